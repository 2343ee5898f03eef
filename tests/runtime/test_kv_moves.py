"""Keys and values that move within SGLang's own pool."""

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tetris_sglang.packing import AcceptedTokens, PackedTokens, empty_packed_tokens
from tetris_sglang.runtime.kv_moves import check_kv_pool, commit_paths


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


def make_step(path: list[list[int]] | None, num_accepted: list[int]) -> tuple[PackedTokens, AcceptedTokens]:
    """Three requests, of four rows, one and three; of columns 0 to 3 the first one has the slots 9, 2, 5, 7."""
    packed = empty_packed_tokens(3, 8, torch.device("cpu"))
    qo_indptr = torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    packed = packed._replace(qo_indptr=qo_indptr, slots=torch.tensor([9, 2, 5, 7, 1, 10, 11, 12]))
    accepted = AcceptedTokens(*[None] * 6)._replace(num_accepted=torch.tensor(num_accepted, dtype=torch.int32))
    return packed, accepted._replace(path=None if path is None else torch.tensor(path))


def test_accepted_nodes_move_to_their_depths():
    pool = make_pool()
    buffers = (*pool.k_buffer, *pool.v_buffer)
    before = [buffer.clone() for buffer in buffers]
    # The first one's nodes 2 and 3 move to depths 1 and 2; the last one's node 1 stands where it belongs.
    commit_paths(pool, *make_step([[0, 2, 3], [0, 3, 3], [0, 1, 3]], [2, 0, 1]))
    for old, new in zip(before, buffers, strict=True):
        assert torch.equal(new[[2, 5]], old[[5, 7]])
        others = [0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 12]
        assert torch.equal(new[others], old[others])


@pytest.mark.parametrize("path", [None, [[0, 1, 2], [0, 3, 3], [0, 1, 3]]], ids=["chains", "first children"])
def test_what_stands_where_it_belongs_stays(path):
    pool = make_pool()
    before = [buffer.clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    commit_paths(pool, *make_step(path, [2, 0, 1]))
    assert all(torch.equal(*pair) for pair in zip(before, (*pool.k_buffer, *pool.v_buffer), strict=True))


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
