"""What the GPU path relies on in SGLang and FlashInfer is there, as read on a machine without a GPU."""

import ast
import importlib.util
import inspect
import re
from importlib import metadata
from pathlib import Path

import pytest

from tetris_sglang.contacts import Symbol, find_missing_symbols
from tetris_sglang.kernels.attention_plan import PlanLayout
from tetris_sglang.runtime.cuda.inventory import SYMBOLS
from tetris_sglang.runtime.inventory import SYMBOLS as COMMON

ROOT = Path(__file__).parents[3]
RELEASE = f"SGLang {metadata.version('sglang')}"
FLASHINFER = f"FlashInfer {metadata.version('flashinfer-python')}"
SCHEDULER = Path(importlib.util.find_spec("flashinfer").origin).parent / "data/include/flashinfer/attention/scheduler.cuh"

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.name)
def test_symbol(symbol: Symbol):
    assert not find_missing_symbols([symbol]), f"{RELEASE} lacks what TETRIS relies on for: {symbol.purpose}"


def test_every_import_is_in_the_inventory():
    names = set()
    for path in (ROOT / "tetris_sglang" / "runtime" / "cuda").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    listed = [symbol.name for symbol in (*SYMBOLS, *COMMON)]
    missing = {name for name in names if not any(f"{entry}.".startswith(f"{name}.") for entry in listed)}
    assert "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend" in names
    assert not missing, "add these to SYMBOLS in tetris_sglang/runtime/cuda/inventory.py"


def test_the_layout_of_flashinfers_plan_is_the_one_that_is_rewritten():
    source = SCHEDULER.read_text()
    body = source[source.index("struct PrefillPlanInfo {") :]
    vector = re.search(r"ToVector\(\) const \{\s*return \{(.*?)\}", body, re.DOTALL).group(1)
    assert tuple(name.strip() for name in vector.split(",")) == PlanLayout._fields, f"{FLASHINFER} plans otherwise"


@pytest.mark.parametrize(
    "line",
    [
        "const uint32_t min_kv_chunk_size = std::max((128 / page_size), 1U);",
        "int num_blocks_per_sm = 2;",
        "uint32_t max_batch_size_if_split = max_grid_size / num_kv_heads;",
        "const int64_t num_tiles_q = ceil_div(packed_qo_len, cta_tile_q);",
        "const int64_t kv_len = std::max(int(effective_kv_len_arr[request_idx]), 1);",
        "merge_indptr.push_back(merge_indptr.back() + num_chunks_kv);",
        "o_indptr.push_back(o_indptr.back() + qo_len * num_chunks_kv);",
        "total_num_tiles_q = ceil_div(total_num_rows * gqa_group_size, cta_tile_q) + batch_size - 1;",
        "block_valid_mask_h[i] = i < new_batch_size;",
        "*total_num_rows_h = qo_indptr_h[batch_size];",
        "return std::make_tuple(enable_cuda_graph || low < max_kv_len, low);",
    ],
)
def test_flashinfer_plans_with_the_arithmetic_that_is_repeated_on_the_device(line):
    source = re.sub(r"\s+", " ", SCHEDULER.read_text())
    assert line in source, f"{FLASHINFER} no longer plans as kernels/attention_plan.py does: {line!r} is gone"


def test_flashinfers_wrapper_has_the_private_names_relied_on():
    import flashinfer

    source = inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    for name in ("_int_workspace_buffer", "_plan_info", "_max_total_num_rows", "_cached_module"):
        assert f"self.{name}" in source, f"{FLASHINFER}: {name} is gone"
