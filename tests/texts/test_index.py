"""What is found in texts stands in them, was written last, and is nobody else's business."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tetris_sglang.texts import Match, RecentTexts, text_evidence
from tetris_sglang.texts.index import ORDERS
from tetris_sglang.texts.match import FIRST_RUNNER_UP, MAX_MATCH

SLOTS, VOCAB = 4, 50
SEEDS = st.integers(0, 10**6)


def count_shared(left: list[int], right: list[int]) -> int:
    """Tokens that both end with, at most MAX_MATCH."""
    shared = 0
    while shared < min(MAX_MATCH, len(left), len(right)) and left[-1 - shared] == right[-1 - shared]:
        shared += 1
    return shared


def read_grams(text: list[int]) -> list[tuple[int, ...]]:
    """The n-grams that end a text, its beginning (as -1) included."""
    return [(*[-1] * (order - len(text)), *text[-order:]) for order in ORDERS]


class ReferenceTexts:
    """By the definition, with texts that are never cut, forgotten or confused."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.spaces: list[int] = []
        self.of_slot: dict[int, int] = {}
        # n-gram in its space, or in its text -> (text, position behind it), the last one
        self.last: dict[tuple, tuple[int, int]] = {}

    def begin(self, slot: int, space: int) -> None:
        self.of_slot[slot] = len(self.texts)
        self.texts.append([])
        self.spaces.append(space)

    def append(self, slot: int, tokens: list[int]) -> None:
        number = self.of_slot[slot]
        text = self.texts[number]
        for token in tokens:
            for gram in read_grams(text):
                place = number, len(text)
                self.last["own", number, gram] = self.last["all", self.spaces[number], gram] = place
            text.append(token)

    def find(self, slot: int) -> dict[str, list[tuple[int, int, int]]]:
        """By whose text: (tokens shared, text, position) of the places that share most."""
        number = self.of_slot[slot]
        text = self.texts[number]
        found = {}
        for scope, of in (("own", number), ("all", self.spaces[number])):
            places = {self.last.get((scope, of, gram)) for gram in read_grams(text)}
            shares = [(count_shared(self.texts[place[0]][: place[1]], text), *place) for place in places if place]
            most = max((share[0] for share in shares), default=0)
            found[scope] = [share for share in shares if share[0] == most]
        return found

    def read(self, number: int, position: int, depth: int) -> list[int]:
        follows = self.texts[number][position:]
        return [follows[step % len(follows)] for step in range(depth)]


class Run:
    """The same requests for both, one at a time in a step, so that 'last' means the same."""

    def __init__(self, seed: int, vocab: int, **settings) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.recent = RecentTexts(SLOTS, VOCAB, **{"are_shared": True} | settings)
        self.reference = ReferenceTexts()

    def draw(self, high: int, count: int = 1) -> list[int]:
        return torch.randint(high, (count,), generator=self.generator).tolist()

    def step(self) -> None:
        slot = self.draw(SLOTS)[0]
        if slot not in self.reference.of_slot or self.draw(6)[0] == 0:
            space = self.draw(2)[0]
            owner = len(self.reference.texts)
            places = self.recent.place([slot], [owner], [space])
            again = self.recent.place([slot], [owner], [space])  # the next piece of a long prompt
            assert places[0, 0] == again[0, 0]
            self.recent.begin(torch.tensor([slot]), again)
            self.reference.begin(slot, space)
        tokens = self.draw(self.vocab, self.draw(6)[0] + 1)
        noise = self.draw(self.vocab, 3)  # rejected
        self.recent.append(torch.tensor([slot]), torch.tensor([[*tokens, *noise]]), torch.tensor([len(tokens)]))
        self.reference.append(slot, tokens)


@given(SEEDS, st.integers(2, 5), st.integers(1, 30), st.booleans())
def test_what_is_found_is_the_last_place_that_shares_most(seed, vocab, steps, are_shared):
    """With room for all. The own text comes first, up to half as many shared tokens; unless shared, it is the only one."""
    run = Run(seed, vocab, are_shared=are_shared, width=256, num_ended=32)
    for _ in range(steps):
        run.step()
    running, depth = sorted(run.reference.of_slot), 5
    found = run.recent.find(torch.tensor(running), depth)
    for row, slot in enumerate(running):
        shares = run.reference.find(slot)
        own, others = (shares[scope][0][0] if shares[scope] else 0 for scope in ("own", "all"))
        others = others if are_shared else own
        assert bool(found.is_others[row]) == (others > 2 * own)
        assert found.match_lens[row] == (others if others > 2 * own else own)
        if own or others:
            # Several n-grams may lead to places that share as much.
            possible = shares["all" if others > 2 * own else "own"]
            assert found.tokens[row].tolist() in [
                run.reference.read(number, position, depth) for _, number, position in possible
            ]
    run.recent.forget()
    assert run.recent.find(torch.tensor(running), depth).match_lens.tolist() == [0] * len(running)


@given(SEEDS, st.sampled_from([16, 1 << 12]), st.integers(9, 20), st.integers(0, 2))
def test_where_there_is_no_room_tokens_are_still_tokens_and_spaces_apart(seed, num_entries, width, num_ended):
    """Entries are overwritten, texts cut, rows used again: what is found still stood in a text of the same space."""
    run = Run(seed, 3, width=width, num_ended=num_ended, num_entries=num_entries)
    for _ in range(40):
        run.step()
    running = sorted(run.reference.of_slot)
    found = run.recent.find(torch.tensor(running), 4)
    assert found.tokens.min() >= 0 and found.tokens.max() < VOCAB
    texts, spaces = run.reference.texts, run.reference.spaces
    for row, slot in enumerate(running):
        number, shared = run.reference.of_slot[slot], int(found.match_lens[row])
        if not shared:
            continue
        known = texts[number][-shared:]
        readable = [text for text, space in zip(texts, spaces, strict=True) if space == spaces[number]]
        assert len(known) == shared
        # Of a match of more than one order's length a part may be a remainder; the order that led there is real.
        order = max(order for order in ORDERS if order <= shared)
        assert any(text[start : start + order] == known[-order:] for text in readable for start in range(len(text)))


def fill(texts: dict[int, list[int]], spaces: dict[int, int] | None = None) -> RecentTexts:
    recent = RecentTexts(SLOTS, VOCAB, are_shared=True, num_ended=1, num_entries=1 << 16)
    for slot, text in texts.items():
        write(recent, slot, text, (spaces or {}).get(slot, 0))
    return recent


def write(recent: RecentTexts, slot: int, text: list[int], space: int = 0) -> None:
    """A new request's prompt."""
    slots = torch.tensor([slot])
    recent.begin(slots, recent.place([slot], [str(text)], [space]))
    recent.append(slots, torch.tensor([text]), torch.tensor([len(text)]))


def test_docstring_example():
    found = fill({0: [7, 1, 2, 3, 9], 1: [1, 2]}).find(torch.tensor([1]), 2)
    assert [part.tolist() for part in found] == [[[3, 9]], [2], [True]]


def test_the_own_text_is_preferred_unless_it_shares_less_than_half():
    anothers = [5, 6, 7, 8, 9]
    for own, expected in (
        ([8, 1, 6, 7, 8], [9]),  # one token shared, and three of the other's
        ([7, 8, 1, 6, 7, 8], [1]),  # two and three
        ([7, 8, 1, 5, 6, 7, 8], [1]),  # two and four
        ([1, 8, 2, 5, 6, 7, 8], [9]),
    ):
        found = fill({0: anothers, 1: own}).find(torch.tensor([1]), 1)
        assert found.tokens[0].tolist() == expected


def test_texts_of_different_spaces_know_nothing_of_each_other():
    texts = {0: [5, 6, 7], 1: [5, 6]}
    for spaces, shared in (({}, 2), ({0: 4, 1: 4}, 2), ({0: 4}, 0), ({1: 4}, 0), ({0: 3, 1: 4}, 0)):
        assert fill(texts, spaces).find(torch.tensor([1]), 1).match_lens == shared


def test_ended_requests_are_remembered_until_there_are_newer_ones():
    recent = RecentTexts(2, VOCAB, are_shared=True, num_ended=1, num_entries=1 << 16)
    write(recent, 0, [5, 6, 7])
    write(recent, 1, [5, 6])
    write(recent, 0, [9, 9, 9])
    assert recent.find(torch.tensor([1]), 1).tokens.tolist() == [[7]]
    write(recent, 0, [8, 8, 8])
    assert recent.find(torch.tensor([1]), 1).match_lens == 0


def test_kinds_of_evidence_say_whose_text_it_was():
    both = Match(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), torch.tensor([False, True]))
    own, others = text_evidence(both).tolist()
    assert [kind - FIRST_RUNNER_UP // 2 for kind in others] == own
    assert own == text_evidence(both._replace(is_others=None))[0].tolist()


@pytest.mark.parametrize("bad", [{"width": 0}, {"num_ended": -1}, {"num_entries": 48}, {"num_entries": 1}])
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=r"a power of two, got .*-?[0-9]+"):
        RecentTexts(2, VOCAB, are_shared=True, **bad)


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: reading one would raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        recent = RecentTexts(SLOTS, VOCAB, are_shared=True, num_entries=64)
        slots = torch.tensor([1, 2])
        recent.begin(slots, torch.zeros(2, 10, dtype=torch.int64))
        recent.append(slots, torch.zeros(2, 3, dtype=torch.int64), slots)
        assert recent.find(slots, 3).tokens.shape == (2, 3)
