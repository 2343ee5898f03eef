"""Moving key-value entries between a request's slots: accepted tree nodes, and branches of a draft's tree."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


def move_kv(kv_pool: MHATokenToKVPool, target: Tensor, source: Tensor) -> None:
    """Give every slot of `target` the keys and values of the same place in `source`, all layers.

    A request's are all read before any is written: branches may change places.

    Args:
        target, source: [batch, n] int64 slots; requests share none.
    Sync: none; CUDA-graph safe.
    """
    if not target.is_cuda:
        kv_pool.move_kv_cache(target.flatten(), source.flatten())
        return
    from tetris_sglang.kernels.move import move_rows

    most_bytes = max(buffer[0].nbytes for buffer in (kv_pool.k_buffer[0], kv_pool.v_buffer[0]))
    move_rows(kv_pool.data_ptrs, kv_pool.data_strides, most_bytes, target.contiguous(), source.contiguous())


def check_kv_pool(kv_pool) -> None:
    """Stop start-up where `move_kv` could not move a pool's entries on a GPU.

    Raises:
        ValueError: naming the flag and the way out.
    """
    from tetris_sglang.kernels.move import WORD_BYTES

    # Subclasses keep scales or other layouts.
    if type(kv_pool) is MHATokenToKVPool and kv_pool.kv_cache_layout == "nhd":
        row_bytes = [buffers[0][0].nbytes for buffers in (kv_pool.k_buffer, kv_pool.v_buffer)]
        if kv_pool.native_k_scale_buffer is None and not any(size % WORD_BYTES for size in row_bytes):
            return
    raise ValueError(
        f"--kv-cache-dtype: draft trees move keys and values, which TETRIS cannot do in this server's {type(kv_pool).__name__}: "
        f"it wants rows of whole words of {WORD_BYTES} bytes, one after the other, and nothing beside them. Use --kv-cache-dtype "
        f"auto, leave SGLANG_USE_HND_KVCACHE unset, or draft chains with --speculative-eagle-topk 1."
    )
