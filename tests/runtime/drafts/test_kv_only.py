"""A pass for keys and values alone leaves what a whole one does, and computes no more than it needs for that."""

from types import SimpleNamespace

import pytest
import torch

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend, has_forward_context

from tetris_sglang.runtime.drafts.kv_only import KVOnlyPasses

HEADS, DIM, SLOTS = 2, 4, 10


class Draft(torch.nn.Module):
    """Layers that mix what attention returns into what the next one reads."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(RadixAttention(HEADS, DIM, 1.0, HEADS, layer_id=i) for i in range(num_layers))
        self.num_finished = 0

    def forward(self, batch) -> None:
        x = batch.input_ids[:, None].float().expand(-1, HEADS * DIM).contiguous()
        for number, layer in enumerate(self.layers):
            x = x + layer(x, x + number, x - number, batch)
        self.num_finished += 1


class Backend:
    def __init__(self, pool) -> None:
        self.pool, self.computed = pool, []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        self.computed.append(layer.layer_id)
        return 3 * v.reshape(q.shape)


class ForwardBatch(SimpleNamespace):
    def mark_forward_metadata_ready(self) -> None:
        self.is_planned = True


def make_runner(num_layers: int) -> SimpleNamespace:
    pool = MHATokenToKVPool(SLOTS, 1, torch.float32, HEADS, DIM, num_layers, "cpu", False)
    runner = SimpleNamespace(
        model=Draft(num_layers),
        token_to_kv_pool=pool,
        dtype=torch.float32,
        attn_backend=Backend(pool),
        prefill_cuda_graph_runner=None,
    )

    def forward(batch) -> None:
        """As ModelRunner.forward: an outer context counts."""
        context = get_attn_backend() if has_forward_context() else runner.attn_backend
        with forward_context(ForwardContext(attn_backend=context)):
            runner.model(batch)

    runner.forward = forward
    return runner


def make_batch() -> ForwardBatch:
    return ForwardBatch(
        input_ids=torch.tensor([3, 1, 4]),
        out_cache_loc=torch.tensor([7, 2, 5]),
        out_cache_loc_is_physical=False,
        is_planned=False,
    )


def read_pool(runner) -> torch.Tensor:
    pool = runner.token_to_kv_pool
    return torch.stack([torch.stack((pool.get_key_buffer(i), pool.get_value_buffer(i))) for i in range(pool.layer_num)])


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_planned", [False, True], ids=["prefill", "planned"])
def test_the_pool_is_as_after_a_whole_pass(num_layers, is_planned, monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.radix_attention.padded_extend_real_tokens", lambda *_: None)
    whole, early = make_runner(num_layers), make_runner(num_layers)
    whole.forward(make_batch())
    passes, batch = KVOnlyPasses(early), make_batch()
    assert passes.has_attention == (num_layers > 1)
    if is_planned:

        def forward(batch, backend) -> None:
            with forward_context(ForwardContext(attn_backend=backend)):
                early.model(batch)

        passes.write(batch, forward)
    else:
        passes.prefill(batch)
        # Attention is planned where a layer computes it.
        assert batch.is_planned == (num_layers == 1)
    assert torch.equal(read_pool(early), read_pool(whole)) and read_pool(early).any()
    assert early.attn_backend.computed == list(range(num_layers - 1))
    assert early.model.num_finished == 0 and not has_forward_context()


@pytest.mark.parametrize("reason", ["a graph", "another pool"])
def test_otherwise_the_pass_is_whole(reason, monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.radix_attention.padded_extend_real_tokens", lambda *_: None)
    runner = make_runner(1)
    if reason == "a graph":
        runner.prefill_cuda_graph_runner = object()
    else:
        runner.dtype = torch.bfloat16  # keys and values are kept in another precision
    passes = KVOnlyPasses(runner)
    passes.prefill(make_batch())
    assert passes.has_attention == (reason == "another pool")
    assert runner.model.num_finished == 1 and runner.attn_backend.computed == [0]
