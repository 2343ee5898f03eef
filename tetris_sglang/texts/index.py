"""What requests wrote lately: their texts, and an index of the n-grams in them, in which matches are found.

Requests repeat themselves, and each other: answers about one document, files of one project, an agent's steps. SGLang's NGRAM
(sglang/srt/speculative/cpp_ngram) and SuffixDecoding (arXiv:2411.04975) keep what was written in a trie on the host. Here the
last tokens of the latest requests, running or ended, are kept on the device, and a hash table that says where each n-gram stood
last: in the request's own text and, if texts are shared, in anyone's. An entry may be overwritten, or point at what is gone:
whatever is found is compared with the text before it counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from tetris_sglang.texts.match import MAX_MATCH, Match

ORDERS = (1, 2, 4, MAX_MATCH)
"""Lengths of the n-grams that are indexed, a text's beginning included. A longer match is found through the longest of them
that is in it."""


def _mix(number: int) -> int:
    """Any number -> one of 64 bits, as int64, that shares no pattern with others' (splitmix64)."""
    number = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    number ^= number >> 31
    return number - 2**64 if number >= 2**63 else number


class RecentTexts:
    """The last `width` tokens of the texts of all requests that run, and of the latest `num_ended` that have ended.

    Args:
        num_slots: of running requests. vocab_size: tokens are below it.
        are_shared: whether requests find anything in one another's texts. It shows in how fast an output comes.
        width: tokens kept of each text. num_ended: texts, where they are shared. num_entries: of the table, a power of two of
            8 bytes each.
    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        are_shared: bool,
        width: int = 2048,
        num_ended: int = 1024,
        num_entries: int = 1 << 22,
    ) -> None:
        num_rows = num_slots + (num_ended if are_shared else 0)
        if width < 1 or num_ended < 0 or num_entries < 2 or num_entries & (num_entries - 1):
            raise ValueError(
                "width must be above 0, num_ended not below 0 and num_entries a power of two, "
                f"got {width}, {num_ended} and {num_entries}"
            )
        self.width, self._vocab_size = width, vocab_size
        self._num_scopes = 1 + are_shared
        self._nowhere = num_rows * width
        # Texts one behind the other, each a ring; then a place for what is not to be kept, and what indices below 0 lead to.
        # Empty places equal no token.
        self._tokens = torch.full((self._nowhere + 1 + MAX_MATCH,), -2, dtype=torch.int32, device=device)
        self._ends = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """Tokens of each text."""
        # Behind each n-gram's last occurrence, with the time in the upper half; the last entry is for what is not to be kept.
        self._table = torch.zeros(num_entries + 1, dtype=torch.int64, device=device)
        self._time, self._time_shift = torch.zeros((), dtype=torch.int64, device=device), self._nowhere.bit_length()
        self._hash_shift, self._hash_mask = 65 - num_entries.bit_length(), num_entries - 1

        def per_slot(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((num_slots, *size), dtype=dtype, device=device)

        self._rows, self._keys = per_slot(), per_slot(dtype=torch.int32)
        self._salts = per_slot(self._num_scopes, len(ORDERS))
        self._tails = per_slot(MAX_MATCH, dtype=torch.int32)
        """The last tokens of the texts, the newest last."""
        self._entries = per_slot(self._num_scopes * len(ORDERS))
        """Where the table keeps the n-grams that end the texts: in the request's own text, then, if shared, in anyone's."""

        # The newest token is the last one.
        self._factors = torch.tensor(
            [[_mix(n) if n < order else 0 for n in reversed(range(MAX_MATCH))] for order in ORDERS],
            device=device,
        )
        self._tail = torch.arange(-MAX_MATCH, 0, device=device)

        self._row_of_slot: list[int] = list(range(num_slots))
        self._owners: list[Hashable | None] = [None] * num_slots
        self._free = deque(range(num_slots, num_rows))
        """Longest free first."""
        self._num_begun = 0

    def place(self, slots: Sequence[int], owners: Sequence[Hashable], spaces: Sequence[int]) -> Tensor:
        """Give the requests in these slots a text each; one that has its text there keeps it.

        Args:
            spaces: texts with different ones know nothing of each other.
        Returns:
            [batch, n] int64 on the host, for `begin`.
        """
        places = []
        for slot, owner, space in zip(slots, owners, spaces, strict=True):
            if self._owners[slot] != owner:
                self._owners[slot] = owner
                self._free.append(self._row_of_slot[slot])
                self._row_of_slot[slot] = self._free.popleft()
            self._num_begun += 1
            # Kept exclusive-or a key, tokens of other spaces are not equal.
            key = _mix(space) & 0x7FFFFFFF if space else 0
            scopes = (-self._num_begun, space)[: self._num_scopes]
            salts = [_mix(_mix(scope) + order) for scope in scopes for order in ORDERS]
            places.append((self._row_of_slot[slot], key, *salts))
        return torch.tensor(places, dtype=torch.int64)

    def begin(self, slots: Tensor, places: Tensor) -> None:
        """The texts of these slots [batch] begin anew.

        Args:
            places: [batch, n] int64, from `place`, on the device.
        Sync: none.
        """
        rows = places[:, 0]
        self._rows[slots], self._keys[slots] = rows, places[:, 1].to(torch.int32)
        self._salts[slots] = places[:, 2:].unflatten(1, self._salts.shape[1:])
        self._ends[rows] = 0
        self._tails[slots] = -1

    def forget(self) -> None:
        """Nothing that was written so far is found any more. Sync: none."""
        self._table.zero_()

    def append(self, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write down what comes next in the texts.

        Args:
            slots: [batch]. tokens: [batch, n] integers, n at most `width`. counts: [batch] int64, how many of them.
        Sync: none; CUDA-graph safe. Of an n-gram that comes several times one place is kept, the same on every device.
        """
        num_tokens = tokens.shape[1]
        rows = self._rows[slots]
        ends = self._ends[rows]
        steps = torch.arange(num_tokens, device=slots.device)
        is_known = steps < counts[:, None]
        places = torch.where(is_known, (ends[:, None] + steps) % self.width + (rows * self.width)[:, None], self._nowhere)
        tokens = tokens.to(torch.int32) ^ self._keys[slots][:, None]
        self._tokens[places] = tokens
        self._ends[rows] = ends + counts

        tokens = torch.cat((self._tails[slots], tokens), dim=1)
        # [batch, n + 1, orders], of the n-grams before each token and behind the last.
        hashes = (tokens.unfold(1, MAX_MATCH, 1)[:, :, None] * self._factors).sum(dim=-1)
        hashes = (hashes[:, :, None] + self._salts[slots][:, None]).flatten(2)
        entries = (hashes >> self._hash_shift) & self._hash_mask
        self._tails[slots] = tokens.gather(1, counts[:, None] + (self._tail + MAX_MATCH))
        self._entries[slots] = entries.gather(1, counts[:, None, None].expand(-1, 1, entries.shape[2])).squeeze(1)
        self._time.add_(1 << self._time_shift)
        written = torch.where(is_known[:, :, None], entries[:, :-1], self._hash_mask + 1)
        stamped = (places + self._time)[:, :, None].expand_as(written)
        self._table.scatter_reduce_(0, written.flatten(), stamped.flatten(), "amax")

    def find(self, slots: Tensor, depth: int) -> Match:
        """What followed the last time one of the texts ended as these do.

        Of the n-grams that end a text, the place of the one that matches longest is taken: in the request's own text, or,
        where more than twice as many tokens match there, in another one. Beyond a text's end its last tokens are repeated, as
        LZ77 does.

        Args:
            slots: [batch]. depth: tokens that are wanted.
        Sync: none; CUDA-graph safe.
        Example: shared texts 7 1 2 3 9 and 1 2, of the second, depth 2 -> tokens [[3, 9]], match_lens [2], is_others [True]
        """
        places = self._table[self._entries[slots]] & (1 << self._time_shift) - 1
        same = self._tokens[places[:, :, None] + self._tail] == self._tails[slots][:, None]
        # An entry that nobody has written anew may lead to whoever has the place by now.
        same[:, : len(ORDERS)] &= (places[:, : len(ORDERS)] // self.width == self._rows[slots][:, None])[:, :, None]
        match_lens = same.flip(2).cumprod(dim=2, dtype=torch.int32).sum(dim=2)
        scopes = -1, self._num_scopes, len(ORDERS)
        match_lens, best = match_lens.view(scopes).max(dim=2, keepdim=True)
        own_lens, others_lens = match_lens[:, 0, 0], match_lens[:, -1, 0]
        found = places.view(scopes).gather(2, best)[:, :, 0]
        is_others = others_lens > 2 * own_lens
        starts = torch.where(is_others, found[:, -1], found[:, 0])
        # Tokens up to the text's end, 1 to width.
        ahead = (self._ends[starts // self.width] - starts - 1) % self.width + 1
        steps = torch.arange(depth, device=slots.device)
        # Where a ring closes, the next text is read instead: once in `width` tokens a draft is bad.
        tokens = self._tokens[(starts[:, None] + steps % ahead[:, None]) % self._nowhere]
        # What is gone may have left anything, even under another key.
        tokens = (tokens ^ self._keys[slots][:, None]).clamp_(0, self._vocab_size - 1)
        return Match(tokens.to(torch.int64), torch.where(is_others, others_lens, own_lens), is_others)
