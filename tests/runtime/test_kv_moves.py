"""Keys and values that move within SGLang's own pool."""

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tetris_sglang.runtime.kv_moves import check_kv_pool, move_kv


def make_pool(head_dim: int = 4, pool_class=MHATokenToKVPool) -> MHATokenToKVPool:
    pool = pool_class(
        size=15,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=head_dim,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    return pool


def test_branches_change_places():
    pool = make_pool()
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    move_kv(pool, torch.tensor([[3, 4, 5], [9, 8, 7]]), torch.tensor([[4, 3, 3], [9, 7, 8]]))
    for old, new in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True):
        assert torch.equal(new[[3, 4, 5, 9, 8, 7]], old[[4, 3, 3, 9, 7, 8]])
        assert torch.equal(new[[0, 1, 2, 6]], old[[0, 1, 2, 6]])


def test_the_pool_says_where_its_rows_are():
    """What the GPU's kernel goes by."""
    pool = make_pool()
    check_kv_pool(pool)
    buffers = (*pool.k_buffer, *pool.v_buffer)
    assert sorted(pool.data_ptrs.tolist()) == sorted(buffer.data_ptr() for buffer in buffers)
    assert pool.data_ptrs.dtype == torch.uint64 and pool.data_strides.dtype == torch.int64
    assert pool.data_strides.tolist() == [buffer[0].nbytes for buffer in buffers]


class OtherPool(MHATokenToKVPool):
    """As those that keep scales or pages of another layout."""


@pytest.mark.parametrize("given", [{"head_dim": 3}, {"pool_class": OtherPool}], ids=["odd rows", "subclass"])
def test_other_pools_are_refused(given):
    with pytest.raises(ValueError, match="--kv-cache-dtype.*--speculative-num-draft-tokens one more"):
        check_kv_pool(make_pool(**given))


def test_other_layouts_are_refused():
    pool = make_pool()
    pool.kv_cache_layout = "hnd"
    with pytest.raises(ValueError, match="SGLANG_USE_HND_KVCACHE"):
        check_kv_pool(pool)
