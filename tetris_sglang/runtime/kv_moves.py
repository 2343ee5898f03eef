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

    move_rows(
        kv_pool.data_ptrs,
        kv_pool.data_strides,
        max(_row_bytes(kv_pool)),
        target.contiguous(),
        source.contiguous(),
    )


def check_kv_pool(kv_pool) -> None:
    """Stop start-up where `move_kv` could not move a pool's entries on a GPU.

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
