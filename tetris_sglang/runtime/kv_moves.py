"""Moving the keys and values of accepted tree nodes to where a chain would have them."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tetris_sglang.packing import AcceptedTokens, PackedTokens


def commit_paths(kv_pool: MHATokenToKVPool, packed: PackedTokens, accepted: AcceptedTokens) -> None:
    """Move the keys and values of accepted tree nodes, all layers, from their own columns to the columns of their depths.

    A request's are all read before any is written. Does nothing for chains, which stand where they belong.

    Sync: none; CUDA-graph safe.
    """
    path, num_accepted = accepted.path, accepted.num_accepted
    if path is None:
        return
    if not path.is_cuda:
        depths = torch.arange(path.shape[1])
        requests, depths = ((path != depths) & (depths <= num_accepted[:, None])).nonzero(as_tuple=True)
        if len(requests) == 0:
            return
        first = packed.qo_indptr[requests]
        kv_pool.move_kv_cache(packed.slots[first + depths], packed.slots[first + path[requests, depths]])
        return
    from tetris_sglang.kernels.move import move_paths

    max_bytes = max(_row_bytes(kv_pool))
    move_paths(kv_pool.data_ptrs, kv_pool.data_strides, max_bytes, packed.slots, packed.qo_indptr, path, num_accepted)


def check_kv_pool(kv_pool) -> None:
    """Stop start-up where `commit_paths` could not move a pool's entries on a GPU.

    Raises:
        ValueError: naming the flag and the way out.
    """
    from tetris_sglang.kernels.move import WORD_BYTES

    if (
        type(kv_pool) is MHATokenToKVPool  # subclasses keep scales or other layouts
        and kv_pool.kv_cache_layout == "nhd"
        and kv_pool.native_k_scale_buffer is None
        and not any(size % WORD_BYTES for size in _row_bytes(kv_pool))
    ):
        return
    raise ValueError(
        f"--kv-cache-dtype: runners-up that are accepted move keys and values, which TETRIS cannot do in this server's "
        f"{type(kv_pool).__name__}: it wants rows of whole words of {WORD_BYTES} bytes, one after the other, and nothing "
        f"beside them. Use --kv-cache-dtype auto, leave SGLANG_USE_HND_KVCACHE unset, or draft chains: "
        f"--speculative-num-draft-tokens one more than --speculative-num-steps."
    )


def _row_bytes(kv_pool: MHATokenToKVPool) -> list[int]:
    """Of a token's keys and of its values in one layer: the two values that `data_strides` has, without asking the device."""
    return [buffer.stride(0) * buffer.element_size() for buffer in (kv_pool.k_buffer[0], kv_pool.v_buffer[0])]
