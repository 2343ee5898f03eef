"""Compiled, not interpreted: for Hopper, on any machine, for Triton brings its own ptxas."""

import os
import re
import subprocess

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler, which TRITON_INTERPRET=1 turns off", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tetris_sglang.kernels import noise
from tetris_sglang.kernels.accept import accept_kernel, accept_tree_kernel
from tetris_sglang.kernels.hand_over import window_kernel
from tetris_sglang.kernels.move import move_kernel, plan_move
from tetris_sglang.kernels.pack import pack_kernel
from tetris_sglang.kernels.select import plan_launch, select_drafts, select_kernel
from tetris_sglang.kernels.tree_mask import tree_mask_kernel

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def compile_for_hopper(kernel, types: dict[str, str], constants: dict[str, object], num_warps: int = 4) -> bytes:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert set(kernel.arg_names) == set(types) | set(constants)
    source = ASTSource(kernel, signature, constants)
    cubin = triton.compile(source, target=HOPPER, options={"num_warps": num_warps}).asm["cubin"]
    assert cubin[:4] == b"\x7fELF"
    return cubin


def count_stack_bytes(cubin: bytes, folder) -> int:
    (folder / "kernel.cubin").write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def test_a_tensor_on_the_cpu_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="need CUDA tensors, got cpu; on a CPU use the torch versions"):
        select_drafts(torch.ones(2, 3), 1)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("batch, max_draft", [(1, 2), (256, 8), (4096, 8), (512, 64)])
def test_selection_compiles_and_stays_in_registers(batch, max_draft, has_weights, tmp_path):
    block, num_warps = plan_launch(batch, max_draft)
    cubin = compile_for_hopper(
        select_kernel,
        {
            "survival": "*fp32",
            "capacity_tokens": "i32",
            "weights": "*fp32",
            "draft_lens": "*i32",
            "batch": "i32",
        },
        {
            "MAX_DRAFT": max_draft,
            "DEPTH_BITS": max_draft.bit_length(),
            "BLOCK": block,
            "HAS_WEIGHTS": has_weights,
        },
        num_warps,
    )
    assert count_stack_bytes(cubin, tmp_path) == 0


@pytest.mark.parametrize("has_depths", [False, True])
@pytest.mark.parametrize("batch, width_block", [(1, 1), (4096, 16)])
def test_packing_compiles(batch, width_block, has_depths):
    pointers = dict.fromkeys(("draft_lens", "req_to_token", "verify_lens", "qo_indptr"), "*i32")
    pointers |= dict.fromkeys(("candidates", "seq_lens", "req_pool_indices", "depths"), "*i64")
    pointers |= dict.fromkeys(("packed_requests", "packed_columns", "positions", "input_ids", "slots"), "*i64")
    integers = dict.fromkeys(("batch", "width", "max_context", "num_tokens"), "i32")
    compile_for_hopper(
        pack_kernel,
        pointers | integers,
        {"HAS_DEPTHS": has_depths, "WHOLE_BATCH": max(256, batch), "BLOCK": 16, "WIDTH_BLOCK": width_block},
    )


@pytest.mark.parametrize("token_type, width_block", [("*i32", 1), ("*i64", 16)])
def test_acceptance_compiles(token_type, width_block):
    pointers = dict.fromkeys(("qo_indptr", "num_accepted"), "*i32") | {"packed_tokens": token_type}
    wide = ("candidates", "seq_lens", "bonus_tokens", "last_tokens", "new_seq_lens", "target_tokens")
    pointers |= dict.fromkeys(wide, "*i64")
    compile_for_hopper(accept_kernel, pointers | {"batch": "i32", "width": "i32"}, {"BLOCK": 16, "WIDTH_BLOCK": width_block})
    pointers |= {"parents": "*i64", "path": "*i64", "width": "i32", "max_depth": "i32"}
    compile_for_hopper(accept_tree_kernel, pointers, {"WIDTH_BLOCK": max(2, width_block)})


def test_masks_of_trees_compile(tmp_path):
    types = dict.fromkeys(("qo_indptr", "kv_indptr", "mask_indptr"), "*i32") | {"parents": "*i64", "packed": "*u8"}
    types |= dict.fromkeys(("max_depth", "num_packed", "batch", "width"), "i32")
    cubin = compile_for_hopper(tree_mask_kernel, types, {"STRIPES": 16, "BLOCK_BYTES": 64})
    assert count_stack_bytes(cubin, tmp_path) == 0


@pytest.mark.parametrize("has_states", [False, True])
def test_windows_compile(has_states):
    types = dict.fromkeys(("num_accepted", "qo_indptr"), "*i32") | dict.fromkeys(("target_tokens", "slots", "tokens"), "*i64")
    types |= {"counts": "*fp32", "path": "*i64"} | dict.fromkeys(("stride", "path_stride", "size", "width"), "i32")
    constants = {"HAS_PATH": True, "HAS_STATES": has_states, "BLOCK": 1024}
    states = dict.fromkeys(("hidden_states", "states"))
    types |= dict.fromkeys(states, "*bf16") if has_states else {}
    compile_for_hopper(window_kernel, types, constants | ({} if has_states else states))


@pytest.mark.parametrize("num_rows", [2, 64, 1024])
def test_moving_compiles_stays_in_registers_and_waits_between_reading_and_writing(num_rows, tmp_path):
    rows, block = plan_move(num_rows)
    types = {"data_ptrs": "*u64", "row_bytes": "*i64", "slots": "*i64", "path": "*i64", "num_columns": "i32"}
    types |= dict.fromkeys(("qo_indptr", "num_accepted"), "*i32")
    cubin = compile_for_hopper(move_kernel, types, {"ROWS": rows, "BLOCK": block})
    assert count_stack_bytes(cubin, tmp_path) == 0
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "kernel.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    barrier = code.index("BAR.SYNC")
    assert "LDG.E" in code[:barrier] and "STG.E" not in code[:barrier]
    assert "STG.E" in code[barrier:]


@pytest.mark.parametrize("logits_type, has_token_ids", [("*fp32", False), ("*bf16", True)])
def test_perturbing_compiles_and_stays_in_registers(logits_type, has_token_ids, tmp_path):
    types = {"logits": logits_type, "seeds": "*i64", "scales": "*fp32", "positions": "*i64"}
    types |= {"token_ids": "*i64"} if has_token_ids else {}
    types |= {"perturbed": "*fp32", "logits_stride": "i32", "columns": "i32"}
    constants = {"HAS_TOKEN_IDS": has_token_ids, "BLOCK": noise.BLOCK}
    constants |= {} if has_token_ids else {"token_ids": None}
    cubin = compile_for_hopper(noise.perturb_kernel, types, constants)
    assert count_stack_bytes(cubin, tmp_path) == 0


def test_drawing_compiles_and_stays_in_registers(tmp_path):
    types = {"weights": "*fp32", "seeds": "*i64", "positions": "*i64", "best": "*fp32", "tokens": "*i64"}
    types |= {"weights_stride": "i32", "columns": "i32", "blocks": "i32"}
    cubin = compile_for_hopper(noise.draw_kernel, types, {"BLOCK": noise.BLOCK})
    assert count_stack_bytes(cubin, tmp_path) == 0
