"""Ragged acceptance: accept_chain's own verdict on packed rows."""

import pytest
import torch

from tests.kernels.batches import Batch, Trees, assert_equal, on_device
from tetris_sglang.kernels.accept import accept_rows
from tetris_sglang.packing import accept_rows_reference, pack_rows_reference

BOTH = pytest.mark.parametrize("accept", [accept_rows, accept_rows_reference])


def random_arguments(batch: int, width: int, seed: int, surplus: int = 0, dtype=torch.int64) -> list[torch.Tensor]:
    """target_tokens, qo_indptr, candidates, seq_lens; two thirds of the drafts are the target's own token."""
    case = Batch.random(batch, width, seed, vocab=3, dtype=dtype)
    packed = pack_rows_reference(*case[-1:], *case[:-1], case.num_tokens + surplus)
    generator = torch.Generator().manual_seed(seed)
    target_tokens = torch.randint(0, 3, (len(packed.requests),), generator=generator)
    following = case.candidates.roll(-1, dims=1)[packed.requests, packed.columns]
    agrees = torch.rand(len(target_tokens), generator=generator) < 0.5
    target_tokens = torch.where(agrees, following, target_tokens).to(dtype)
    return [target_tokens, packed.qo_indptr, case.candidates, case.seq_lens]


@BOTH
def test_docstring_example(accept):
    accepted = accept(
        *on_device(
            torch.tensor([1, 5, 6, 3]),
            torch.tensor([0, 3, 4], dtype=torch.int32),
            torch.tensor([[7, 1, 2], [8, 3, 4]]),
            torch.tensor([10, 20]),
        )
    )
    assert accepted.num_accepted.tolist() == [1, 0]
    assert accepted.bonus_tokens.tolist() == [5, 3]
    assert accepted.last_tokens.tolist() == [1, 8]
    assert accepted.new_seq_lens.tolist() == [12, 21]
    assert accepted.target_tokens.tolist() == [[1, 5, 6], [3, 0, 0]]


@BOTH
def test_one_request_at_a_time(accept):
    """The rule, read aloud; rejections, full acceptances and requests without drafts all occur."""
    target_tokens, qo_indptr, candidates, seq_lens = random_arguments(batch=70, width=5, seed=2)
    accepted = accept(*on_device(target_tokens, qo_indptr, candidates, seq_lens))
    kinds = set()
    for request, (begin, end) in enumerate(zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True)):
        rows, drafts = target_tokens[begin:end].tolist(), candidates[request, 1 : end - begin].tolist()
        accept_len = 0
        while accept_len < len(drafts) and drafts[accept_len] == rows[accept_len]:
            accept_len += 1
        kinds.add((accept_len > 0, accept_len == len(drafts)))
        assert accepted.num_accepted[request] == accept_len
        assert accepted.bonus_tokens[request] == rows[accept_len]
        assert accepted.last_tokens[request] == candidates[request, accept_len]
        assert accepted.new_seq_lens[request] == seq_lens[request] + accept_len + 1
        assert accepted.target_tokens[request].tolist() == rows + [0] * (5 - len(rows))
    assert len(kinds) == 4


@pytest.mark.parametrize("batch", [1, 15, 16, 17, 257])
@pytest.mark.parametrize("width", [1, 2, 7, 17])
def test_equals_torch(batch, width):
    for surplus, dtype in [(0, torch.int64), (9, torch.int32)]:
        case = random_arguments(batch, width, seed=batch + width, surplus=surplus, dtype=dtype)
        assert_equal(accept_rows(*on_device(*case)), accept_rows_reference(*case))


def test_unselected_drafts_and_surplus_rows_never_matter():
    target_tokens, qo_indptr, candidates, seq_lens = random_arguments(batch=40, width=6, seed=5, surplus=8)
    expected = accept_rows_reference(target_tokens, qo_indptr, candidates, seq_lens)
    garbled = candidates.clone()
    verify_lens = qo_indptr.diff()
    # The worst garbage: the first unselected draft is the bonus token after a full acceptance.
    last_rows = target_tokens[qo_indptr[1:] - 1]
    beyond = torch.arange(6) >= verify_lens[:, None]
    garbled = torch.where(beyond, last_rows[:, None], garbled)
    target_tokens[-8:] = -(2**40)
    assert_equal(accept_rows(*on_device(target_tokens, qo_indptr, garbled, seq_lens)), expected)


def random_trees(batch: int, width: int, seed: int, dtype=torch.int64) -> tuple[list[torch.Tensor], int]:
    """The arguments but for the depth, and the depth; the target likes first children."""
    trees, case = Trees.random(batch, width, seed), Batch.random(batch, width, seed, dtype=dtype)
    lens = case.draft_lens + 1
    qo_indptr = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    generator = torch.Generator().manual_seed(seed)
    target_tokens = torch.randint(0, 3, (int(lens.sum()) + 4,), generator=generator)
    target_tokens *= torch.rand(len(target_tokens), generator=generator) < 0.5
    return [target_tokens.to(dtype), qo_indptr, trees.candidates, case.seq_lens, trees.parents], trees.max_depth


@BOTH
def test_one_tree_at_a_time(accept):
    """The rule, read aloud: from the root to the child that the target has drawn, as long as there is one."""
    (target_tokens, qo_indptr, candidates, seq_lens, parents), max_depth = random_trees(batch=60, width=7, seed=3)
    accepted = accept(*on_device(target_tokens, qo_indptr, candidates, seq_lens, parents), max_depth)
    lens = set()
    for request, (begin, end) in enumerate(zip(qo_indptr[:-1].tolist(), qo_indptr[1:].tolist(), strict=True)):
        path = [0]
        while True:
            drawn = int(target_tokens[begin + path[-1]])
            found = [
                node
                for node in range(1, end - begin)
                if parents[request, node] == path[-1] and candidates[request, node] == drawn
            ]
            if not found:
                break
            path.append(found[0])
        lens.add(len(path))
        emitted = [int(target_tokens[begin + node]) for node in path]
        assert accepted.num_accepted[request] == len(path) - 1
        assert accepted.path[request].tolist() == path + [6] * (max_depth + 1 - len(path))
        assert accepted.target_tokens[request].tolist() == emitted + [0] * (7 - len(path))
        assert accepted.bonus_tokens[request] == emitted[-1]
        assert accepted.last_tokens[request] == candidates[request, path[-1]]
        assert accepted.new_seq_lens[request] == seq_lens[request] + len(path)
    assert len(lens) > 3


@pytest.mark.parametrize("batch, width", [(1, 2), (16, 7), (33, 17)])
def test_trees_equal_torch(batch, width):
    for dtype in (torch.int64, torch.int32):
        case, max_depth = random_trees(batch, width, seed=batch + width, dtype=dtype)
        assert_equal(accept_rows(*on_device(*case), max_depth), accept_rows_reference(*case, max_depth))


def test_an_empty_batch():
    nothing, qo_indptr = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    accepted = accept_rows(*on_device(nothing, qo_indptr, nothing.view(0, 3), nothing))
    assert accepted.target_tokens.shape == (0, 3) and accepted.num_accepted.shape == (0,)


def test_bad_input_is_named():
    target_tokens, qo_indptr, candidates, seq_lens = on_device(*random_arguments(batch=3, width=4, seed=0))
    for bad, message in [
        ((target_tokens[:, None], qo_indptr, candidates, seq_lens), r"target_tokens \[num_tokens\]"),
        ((target_tokens.float(), qo_indptr, candidates, seq_lens), "target_tokens must be torch.int32 or"),
        ((target_tokens, qo_indptr[1:], candidates, seq_lens), r"qo_indptr must be torch.int32 \[4\]"),
        ((target_tokens, qo_indptr.long(), candidates, seq_lens), r"qo_indptr must be torch.int32 \[4\]"),
        ((target_tokens, qo_indptr, candidates[0], seq_lens), r"candidates must be \[batch, width\]"),
        ((target_tokens, qo_indptr, candidates.int(), seq_lens), r"candidates must be torch.int64 \[3, 4\]"),
        ((target_tokens, qo_indptr, candidates, seq_lens[:1]), "seq_lens must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            accept_rows(*bad)
