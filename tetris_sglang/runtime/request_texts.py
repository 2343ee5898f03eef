"""Every request's tokens on the device, so that a step looks things up in them without waiting for the host."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor

from tetris_sglang.observers import StepRecord
from tetris_sglang.runtime.host_copy import send
from tetris_sglang.texts import RecentTexts

_MAX_WAITING = 32
"""Plain steps whose tokens wait to be written together."""


class RequestTexts:
    """An `Observer` that keeps prompt and output of the request in every slot and, if shared, what others, running or ended,
    have to say to it.

    Requests whose prefixes SGLang's cache keeps apart (`extra_key`, `cache_salt`) find nothing in each other's texts.

    Args:
        req_to_token_pool: SGLang's, whose slots these are. vocab_size: of the target.
        max_emitted: tokens that a step writes per request: behind a text's end, some that are not part of it.
        are_searched: whether anything is looked up in them. are_shared: whether requests find anything in one another's.
    """

    def __init__(
        self,
        req_to_token_pool,
        vocab_size: int,
        max_emitted: int,
        are_searched: bool = True,
        are_shared: bool = False,
    ) -> None:
        slots, columns = req_to_token_pool.req_to_token.shape
        self.tokens = torch.zeros(
            (slots, columns + max_emitted), dtype=torch.int32, device=req_to_token_pool.req_to_token.device
        )
        """[slots, columns], a text from column 0 on; complete after `flush`."""
        self.max_emitted = max_emitted
        self.recent = RecentTexts(slots, vocab_size, self.tokens.device, are_shared=are_shared) if are_searched else None
        """Where matches are found, after `flush`."""
        self._waiting: list[Tensor] = []
        # Requests, slots and lengths at the first of them.
        self._waiting_for: tuple[Sequence, Tensor, Tensor] = (), torch.empty(0), torch.empty(0)

    def begin(self, batch, next_token_ids: Tensor) -> None:
        """Write down what an extend batch read, prefixes from the cache included, and the token after it.

        Args:
            batch: the extend ScheduleBatch. next_token_ids: [batch].
        Sync: none.
        """
        self.flush()
        device = self.tokens.device
        texts = [torch.frombuffer(req.get_fill_ids(), dtype=torch.int64) for req in batch.reqs]
        lens = [len(text) for text in texts]
        # One copy for all: where each text begins in it, and which column its tokens go to.
        starts = torch.tensor([0, *accumulate(lens)][:-1])
        columns = torch.arange(sum(lens)) - starts.repeat_interleave(torch.tensor(lens))
        rows = batch.req_pool_indices.repeat_interleave(send(lens, device), output_size=sum(lens))
        self.tokens[rows, send(columns, device)] = send(torch.cat(texts).to(torch.int32), device)
        self.tokens[batch.req_pool_indices, batch.seq_lens] = next_token_ids.to(torch.int32)
        if self.recent is not None:
            self._index(batch.reqs, batch.req_pool_indices, texts, next_token_ids)

    def _index(self, reqs: Sequence, rows: Tensor, texts: Sequence[Tensor], next_token_ids: Tensor) -> None:
        """Tell the recent texts of an extend batch."""
        device = self.tokens.device
        places = self.recent.place(
            [req.kv.req_pool_idx for req in reqs],
            [req.rid for req in reqs],
            [_space(req) for req in reqs],
        )
        self.recent.begin(rows, send(places, device))
        ends = [text[1 - self.recent.width :].to(torch.int32) for text in texts]
        counts = send([len(end) for end in ends], device)
        # One more column for the token after each.
        ends = torch.nn.functional.pad(torch.nn.utils.rnn.pad_sequence(ends, batch_first=True), (0, 1))
        tokens = send(ends, device).scatter_(1, counts[:, None], next_token_ids.to(torch.int32)[:, None])
        self.recent.append(rows, tokens, counts + 1)

    def observe(self, record: StepRecord) -> None:
        emitted = record.accepted.target_tokens[:, : record.max_drafts + 1]
        self.append(record.batch, emitted, record.accepted.num_accepted)

    def append(self, batch, target_tokens: Tensor, num_accepted: Tensor) -> None:
        """Write down what a decode batch emitted.

        Args:
            batch: the ScheduleBatch, its lengths still those of before, without the root.
            target_tokens: [batch, n], the emitted tokens first. What stands behind them lies beyond the text, too, until it is
                overwritten.
            num_accepted: [batch], tokens that were emitted but for the last one.
        Sync: none.
        """
        is_plain = target_tokens.shape[1] == 1
        if not is_plain or len(self._waiting) == _MAX_WAITING or self._waiting_for[0] != batch.reqs:
            self.flush()
        if not is_plain:
            self._write(batch.req_pool_indices, batch.seq_lens, target_tokens, num_accepted + 1)
            return
        # Writing many tokens takes as long as writing one, and nobody looks before `flush`.
        if not self._waiting:
            # SGLang writes into its own rows again; these are read by a later step.
            self._waiting_for = list(batch.reqs), batch.req_pool_indices.clone(), batch.seq_lens.clone()
        self._waiting.append(target_tokens)

    def flush(self) -> None:
        """Write down what plain steps emitted. Sync: none."""
        if self._waiting:
            _, rows, seq_lens = self._waiting_for
            tokens = torch.cat(self._waiting, dim=1)
            self._waiting.clear()
            self._write(rows, seq_lens, tokens, torch.full_like(rows, tokens.shape[1]))

    def _write(self, rows: Tensor, seq_lens: Tensor, tokens: Tensor, counts: Tensor) -> None:
        columns = seq_lens[:, None] + torch.arange(1, tokens.shape[1] + 1, device=seq_lens.device)
        self.tokens[rows[:, None], columns] = tokens.to(torch.int32)
        if self.recent is not None:
            self.recent.append(rows, tokens, counts)

    def forget(self) -> None:
        """SGLang's cache is flushed: nothing is found any more in what requests wrote. Sync: none."""
        self.flush()
        if self.recent is not None:
            self.recent.forget()

    def count(self, rows: Tensor, starts: Tensor, ends: Tensor, most: int, vocab_size: int) -> Tensor:
        """How often each token stands in a part of a text.

        Args:
            rows: [batch], the requests' slots. starts, ends: [batch], the part's columns, the end not included.
            most: that any of them has.
        Returns:
            [batch, vocab_size] float32.
        Sync: none.
        """
        self.flush()
        columns = starts[:, None] + torch.arange(most, device=starts.device)
        counts = columns < ends[:, None]
        tokens = self.tokens[rows[:, None], columns.clamp(max=self.tokens.shape[1] - 1)].long()
        return counts.new_zeros((len(rows), vocab_size), dtype=torch.float32).scatter_add_(1, tokens, counts.float())


def _space(req) -> int:
    """The same number for requests that SGLang's prefix cache lets share, in every process; 0 where nothing was said."""
    keys = req.extra_key, req.cache_salt
    if not any(keys):
        return 0
    return int.from_bytes(blake2b(repr(keys).encode(), digest_size=8).digest(), "little", signed=True)
