"""Packed linear layers multiply as plain ones do, and follow their weights."""

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

from tetris_sglang.portable_cpu import linear


def plain(_method, layer, x, bias=None):
    return torch.nn.functional.linear(x, layer.weight, bias)


def make_layer(out, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(weight=torch.randn(out, width, generator=generator))


def refuse(*_):
    raise AssertionError("the packed path was expected")


@pytest.fixture(autouse=True)
def _on_any_cpu(monkeypatch):
    monkeypatch.setattr(linear, "_ROWS_OF_TORCH", 0)


@pytest.mark.parametrize("rows", [1, 2, 5, 17, 32, 33, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_product(rows, has_bias):
    layer, x = make_layer(1024, 513), torch.randn(rows, 513)
    bias = torch.randn(1024) if has_bias else None
    expected = x.double() @ layer.weight.double().T + (bias.double() if has_bias else 0)
    torch.testing.assert_close(linear.apply(refuse, None, layer, x, bias).double(), expected, rtol=1e-5, atol=1e-4)


def test_leading_dimensions_stay():
    layer, x = make_layer(1024, 512), torch.randn(2, 3, 512)
    torch.testing.assert_close(linear.apply(refuse, None, layer, x), plain(None, layer, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "out, width, rows, dtype",
    [(64, 64, 32, torch.float32), (1024, 512, 32, torch.bfloat16)],
    ids=["small weight", "bfloat16"],
)
def test_left_to_torch(out, width, rows, dtype):
    layer = make_layer(out, width)
    layer.weight = layer.weight.to(dtype)
    linear.apply(plain, None, layer, torch.randn(rows, width, dtype=dtype))
    assert not hasattr(layer, "_tetris_packed")


@pytest.mark.parametrize("vendor, rows_of_torch", [("GenuineIntel", 3), ("AuthenticAMD", 0)])
def test_few_rows_are_left_to_torch_on_intel(monkeypatch, tmp_path, vendor, rows_of_torch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(linear, "_ROWS_OF_TORCH", linear._count_rows_of_torch(cpuinfo))
    layer = make_layer(1024, 512)
    was_left = []
    for rows in range(1, 6):
        was_left.clear()
        linear.apply(lambda *args: was_left.append(True), None, layer, torch.randn(rows, 512))
        assert bool(was_left) == (rows <= rows_of_torch)


def test_no_cpuinfo_no_row_is_left_to_torch(tmp_path):
    assert linear._count_rows_of_torch(tmp_path / "cpuinfo") == 0


def test_the_vocabulary_s_weight_is_packed_too():
    head = make_layer(1024, 512)
    head.quant_method = UnquantizedEmbeddingMethod()
    processor, x = SimpleNamespace(rl_on_policy_target=None), torch.randn(3, 512)
    logits = linear.compute_lm_head(refuse, processor, x, head)
    torch.testing.assert_close(logits, x @ head.weight.T, rtol=1e-4, atol=1e-4)
    # A draft is given its target's weight after it was made.
    head.weight = make_layer(1024, 512, seed=1).weight
    logits = linear.compute_lm_head(refuse, processor, x, head)
    torch.testing.assert_close(logits, x @ head.weight.T, rtol=1e-4, atol=1e-4)


def test_a_quantised_vocabulary_is_left_to_sglang():
    head = make_layer(1024, 512)
    head.quant_method = object()
    called = []
    linear.compute_lm_head(lambda *_, **__: called.append(True), SimpleNamespace(rl_on_policy_target=None), None, head)
    assert called


@pytest.mark.parametrize("fails", [False, True])
def test_follows_updated_weights(fails):
    """Weight loaders write through `.data`, which leaves no trace on the parameter."""
    layer, x = make_layer(1024, 512), torch.randn(8, 512)
    linear.apply(refuse, None, layer, x)

    def update():
        layer.weight.data.copy_(make_layer(1024, 512, seed=1).weight)
        if fails:
            raise RuntimeError("half of it")

    if fails:
        with pytest.raises(RuntimeError, match="half of it"):
            linear.forget_packed(update)
    else:
        linear.forget_packed(update)
    torch.testing.assert_close(linear.apply(refuse, None, layer, x), plain(None, layer, x), rtol=1e-4, atol=1e-4)
