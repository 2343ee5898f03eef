"""The texts on the device are the requests' own, whatever happens to their slots."""

import random
from array import array
from types import SimpleNamespace

import pytest
import torch

from tests.records import make_record
from tetris_sglang.drafting import make_chains
from tetris_sglang.estimates.estimator import AcceptanceEstimator
from tetris_sglang.runtime.request_texts import RequestTexts
from tetris_sglang.texts import FIRST_COPIED, INITIAL_OFFSETS

SLOTS, COLUMNS, WIDTH = 6, 40, 4


def make_texts(columns: int = COLUMNS, are_shared: bool = True) -> RequestTexts:
    pool = SimpleNamespace(req_to_token=torch.zeros(SLOTS, columns, dtype=torch.int32))
    return RequestTexts(pool, vocab_size=99, max_emitted=WIDTH, are_shared=are_shared)


def make_batch(slots: list[int], texts: dict[int, list[int]]):
    """As SGLang's: lengths without the newest token."""
    fill_ids = [array("q", texts[slot][:-1]) for slot in slots]
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                get_fill_ids=lambda ids=ids: ids,
                extra_key=None,
                cache_salt=None,
                rid=f"{slot}: {ids.tolist()}",
                kv=SimpleNamespace(req_pool_idx=slot),
            )
            for slot, ids in zip(slots, fill_ids, strict=True)
        ],
        req_pool_indices=torch.tensor(slots),
        seq_lens=torch.tensor([len(ids) for ids in fill_ids]),
    )


def test_texts_follow_prompts_steps_and_new_requests_in_old_slots():
    rng, texts, known = random.Random(0), make_texts(), {}
    for _ in range(60):
        if not known or rng.random() < 0.3:
            slots = rng.sample(range(SLOTS), rng.randint(1, 3))
            for slot in slots:  # an earlier request of the slot has ended
                known[slot] = [rng.randrange(99) for _ in range(rng.randint(2, 12))]
            texts.begin(make_batch(slots, known), torch.tensor([known[slot][-1] for slot in slots]))
        else:
            slots = rng.sample(sorted(known), rng.randint(1, len(known)))
            slots = [slot for slot in slots if len(known[slot]) + WIDTH < COLUMNS]
            if not slots:
                known.clear()
                continue
            batch = make_batch(slots, known)
            emitted = torch.randint(99, (len(slots), WIDTH))
            counts = [rng.randint(1, WIDTH) for _ in slots]
            texts.append(batch, emitted, torch.tensor(counts) - 1)
            for slot, row, count in zip(slots, emitted.tolist(), counts, strict=True):
                known[slot] += row[:count]
        texts.flush()
        for slot, text in known.items():
            assert texts.tokens[slot, : len(text)].tolist() == text


def test_a_match_is_found_in_the_slot_s_own_text():
    texts = make_texts()
    known = {4: [5, 6, 7, 5, 6], 1: [9, 9, 8]}
    texts.begin(make_batch([4, 1], known), torch.tensor([6, 8]))
    found = texts.recent.find(torch.tensor([4, 1]), 3)
    assert found.match_lens.tolist() == [2, 0]
    assert found.tokens[0].tolist() == [7, 5, 6]


def test_of_a_long_prompt_the_end_is_searched():
    texts = make_texts(columns=5000)
    prompt = [1, 2, 3, *[4] * 4000, 5, 6, 7, 8, *[9] * 30, 1, 2, 5, 6]
    texts.begin(make_batch([0], {0: prompt}), torch.tensor([6]))
    found = texts.recent.find(torch.tensor([0]), 2)
    assert (found.match_lens.tolist(), found.tokens.tolist()) == ([2], [[7, 8]])


@pytest.mark.parametrize("key", ["extra_key", "cache_salt"])
def test_what_another_request_wrote_is_matched_until_it_is_forgotten(key):
    """Whichever wrote it: prompt, steps, or one that is gone; not across cache salts."""
    texts, known = make_texts(), {3: [1, 2, 3], 0: [8, 4, 5], 2: [9, 4, 5]}
    texts.begin(make_batch([3], known), torch.tensor([3]))
    texts.append(make_batch([3], known), torch.tensor([[4, 5, 6, 7]]), torch.tensor([2]))
    texts.begin(make_batch([0], known), torch.tensor([5]))
    found = texts.recent.find(torch.tensor([0]), 2)
    assert (found.match_lens.tolist(), found.tokens[0, 0].item(), found.is_others.tolist()) == (
        [2],
        6,
        [True],
    )
    salted = make_batch([2], known)
    setattr(salted.reqs[0], key, "another tenant's")
    texts.begin(salted, torch.tensor([5]))
    assert texts.recent.find(torch.tensor([2]), 2).match_lens.tolist() == [0]
    # The slot's next request: what the one before wrote is still known.
    known[3] = [7, 7]
    texts.begin(make_batch([3], known), torch.tensor([7]))
    found = texts.recent.find(torch.tensor([0, 3]), 2)
    assert (found.match_lens.tolist(), found.tokens[0, 0].item()) == ([2, 1], 6)
    texts.forget()
    assert texts.recent.find(torch.tensor([0]), 2).match_lens.tolist() == [0]


def test_a_copied_token_teaches_its_kind_and_no_score():
    """The draft gave it none: it must not move what scores are worth."""
    depth = 2
    estimator = AcceptanceEstimator(depth)
    kinds = torch.tensor([[1, FIRST_COPIED], [0, FIRST_COPIED + 1]])
    probs = torch.full((2, depth), 0.5)
    proposal = make_chains(torch.tensor([[1, 2], [3, 4]]), probs, probs, kinds)
    for _ in range(8):
        estimator.observe(make_record(proposal, selected=[2, 2], num_accepted=[2, 1]))
    offsets = estimator.evidence.summarise()
    assert offsets[FIRST_COPIED] > INITIAL_OFFSETS[FIRST_COPIED]  # accepted
    assert offsets[FIRST_COPIED + 1] < INITIAL_OFFSETS[FIRST_COPIED + 1]  # rejected
    counts = {cell.depth: cell.count for cell in estimator.calibration.reliability().bins}
    assert set(counts) == {1}  # both tokens of the second level were copied


def test_what_plain_steps_write_is_found_once_it_is_looked_for():
    """Whoever runs beside it, comes or goes: as if every step had been written down by itself."""
    rng = random.Random(1)
    together, one_by_one, known = make_texts(are_shared=False), make_texts(are_shared=False), {}
    for _ in range(200):
        kind = rng.random()
        if not known or kind < 0.1:
            slots = rng.sample(range(SLOTS), rng.randint(1, 2))
            for slot in slots:
                known[slot] = [rng.randrange(4) for _ in range(rng.randint(2, 6))]
            for texts in (together, one_by_one):
                newest = torch.tensor([known[slot][-1] for slot in slots])
                texts.begin(make_batch(slots, known), newest)
            requests = {slot: object() for slot in known}
            continue
        slots = sorted(slot for slot in known if len(known[slot]) + WIDTH < COLUMNS)
        if not slots:
            known.clear()
            continue
        batch = make_batch(slots, known)
        batch.reqs = [requests[slot] for slot in slots]
        width = 1 if kind < 0.8 else 3
        emitted, counts = torch.randint(4, (len(slots), width)), torch.full((len(slots),), width)
        for texts in (together, one_by_one):
            texts.append(batch, emitted, counts - 1)
        one_by_one.flush()
        for slot, row in zip(slots, emitted.tolist(), strict=True):
            known[slot] += row
        if kind > 0.7:
            together.flush()
            found, expected = (texts.recent.find(torch.tensor(slots), 3) for texts in (together, one_by_one))
            assert all(map(torch.equal, found, expected))
