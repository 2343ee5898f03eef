"""What a step hands to the next one's draft, against torch."""

import pytest
import torch

from tests.kernels.batches import DEVICE, Batch, Trees, on_device
from tetris_sglang.kernels.hand_over import keep_windows
from tetris_sglang.packing import AcceptedTokens, accept_rows_reference, keep_windows_reference

BATCH, WIDTH = 19, 6


def random_acceptance(has_trees: bool) -> tuple[AcceptedTokens, torch.Tensor]:
    """And qo_indptr."""
    case, trees = Batch.random(BATCH, WIDTH, seed=1), Trees.random(BATCH, WIDTH, seed=1)
    qo_indptr = torch.nn.functional.pad((case.draft_lens + 1).cumsum(0, dtype=torch.int32), (1, 0))
    tokens = torch.randint(0, 2, (int(qo_indptr[-1]),), generator=torch.Generator().manual_seed(2))
    shape = (trees.parents, trees.max_depth) if has_trees else ()
    accepted = accept_rows_reference(tokens, qo_indptr, trees.candidates, case.seq_lens, *shape)
    assert len(accepted.num_accepted.unique()) > 2
    return accepted, qo_indptr


def to_device(accepted: AcceptedTokens) -> AcceptedTokens:
    return AcceptedTokens(*(None if field is None else field.to(DEVICE) for field in accepted))


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("size", [None, 5, 1500])
def test_equals_torch_where_anything_is_real(has_trees, size):
    accepted, qo_indptr = random_acceptance(has_trees)
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(BATCH + 2, generator=generator)[:BATCH]
    hidden = states = kept = None
    if size is not None:
        hidden, states = torch.randn(int(qo_indptr[-1]), size, generator=generator), torch.full((BATCH + 2, WIDTH, size), 7.0)
        kept = states.to(DEVICE, copy=True)
    tokens, counts, expected_states = keep_windows_reference(accepted, qo_indptr, hidden, WIDTH)
    hidden = None if hidden is None else hidden.to(DEVICE)
    found, found_counts = keep_windows(to_device(accepted), qo_indptr.to(DEVICE), hidden, kept, slots.to(DEVICE), WIDTH)
    is_real = torch.arange(WIDTH) >= WIDTH - counts[:, None]
    assert torch.equal(found_counts.cpu(), counts[:, None].float())
    assert torch.equal(found.cpu(), tokens.masked_fill(~is_real, 0))
    if size is not None:
        rows, columns = is_real.nonzero(as_tuple=True)
        states[slots[rows], columns] = expected_states[rows, columns]
        assert torch.equal(kept.cpu(), states)


def test_bad_arguments_are_named():
    accepted, qo_indptr = random_acceptance(has_trees=True)
    slots, hidden, states = torch.arange(BATCH), torch.zeros(int(qo_indptr[-1]), 8), torch.zeros(BATCH, WIDTH, 8)
    for name, bad in {
        "target_tokens": (accepted._replace(target_tokens=accepted.target_tokens.int()), qo_indptr, hidden, states, slots),
        "num_accepted": (accepted._replace(num_accepted=accepted.num_accepted.long()), qo_indptr, hidden, states, slots),
        "path": (accepted._replace(path=accepted.path.int()), qo_indptr, hidden, states, slots),
        "qo_indptr": (accepted, qo_indptr[1:], hidden, states, slots),
        "states": (accepted, qo_indptr, hidden, states[:, 1:], slots),
        "slots": (accepted, qo_indptr, hidden, states, slots.float()),
    }.items():
        with pytest.raises(ValueError, match=name):
            keep_windows(to_device(bad[0]), *on_device(*bad[1:]), WIDTH)
