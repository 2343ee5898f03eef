"""What a draft loses on a batch of texts, and what a server would accept of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tetris_sglang.tools.distill.corpus import Text, make_batches, pad
from tetris_sglang.tools.distill.divergence import agreement_on
from tetris_sglang.tools.distill.heads import TargetStates
from tetris_sglang.tools.distill.students import HeadStudent, StandaloneStudent, Teacher

STEP_DECAY = 0.8
"""What a place of the chain counts less than the one before it, which is reached more often."""


class Lesson(nn.Module):
    """A student with its loss, all in one forward pass (several processes add their gradients behind it).

    Args:
        divergence: of the student's law from the target's (`DIVERGENCES`).
        greedy_share: of the loss that is the cross-entropy to the target's likeliest token, where the student can say it: what
            greedy requests accept by.
    """

    def __init__(
        self, student: StandaloneStudent | HeadStudent, divergence: Callable[[Tensor, Tensor], Tensor], greedy_share: float
    ) -> None:
        super().__init__()
        self.student, self._divergence, self._greedy_share = student, divergence, greedy_share

    def forward(self, token_ids: Tensor, is_learnt: Tensor, states: TargetStates, steps: int) -> tuple[Tensor, Tensor]:
        """The loss, and the share of first drafts that are the target's likeliest token.

        Args:
            token_ids, is_learnt: as in `Batch`. states: the target's, of the same tokens. steps: of the chains.
        """
        total, weights, right = token_ids.new_zeros((), dtype=torch.float32), 0.0, None
        ids = self.student.draft_ids
        for place, drafted in enumerate(self.student.unroll(token_ids, states, steps)):
            there = slice(drafted.first, drafted.first + drafted.rows.shape[1])
            learnt = is_learnt[:, there]
            if not learnt.any():
                continue
            log_q = self.student.read_logits(drafted.rows[learnt]).float().log_softmax(-1)
            with torch.no_grad():
                p = states.logits[:, there][learnt].float().softmax(-1)
                likeliest = p.max(-1).values
                p = p[:, : log_q.shape[1]] if ids is None else p[:, ids]
                highest, column = p.max(-1)
                can_say = highest == likeliest
            loss = self._divergence(p, log_q).mean() * (1 - self._greedy_share)
            own = log_q.gather(-1, column[:, None])[:, 0]
            loss = loss - self._greedy_share * (own * can_say).sum() / can_say.sum().clamp(min=1)
            weight = STEP_DECAY**place
            total, weights = total + weight * loss, weights + weight
            if right is None:
                right = ((log_q.argmax(-1) == column) & can_say).float().mean().detach()
        return total / max(weights, 1e-9), token_ids.new_zeros((), dtype=torch.float32) if right is None else right


@dataclass
class Accepted:
    """Of chains from every place where a server would draft."""

    passes: float = 0.0
    at: list[float] = field(default_factory=list)
    """Passes that accepted so many drafts and more, beginning with one."""

    def add(self, other: Accepted) -> None:
        self.passes += other.passes
        self.at = [a + b for a, b in zip(self.at or [0.0] * len(other.at), other.at, strict=True)]

    @property
    def mean(self) -> float:
        """Drafts accepted per pass."""
        return sum(self.at) / max(self.passes, 1e-9)

    @property
    def rates(self) -> list[float]:
        """Of the drafts at each place that were reached, the share accepted."""
        reached = [self.passes, *self.at]
        return [b / max(a, 1e-9) for a, b in pairwise(reached)]


def walk(chances: np.ndarray, first: int) -> Accepted:
    """Serve a text: each pass begins behind what the one before it emitted.

    Args:
        chances: [places, chain]: how likely the draft at each place of the chain that begins after a token is accepted if those
            before it are; the text has all of their tokens.
        first: the place after which the first pass drafts.
    """
    num_places, chain = chances.shape
    reached = chances.cumprod(axis=1)
    visits = np.zeros(num_places + chain + 2)
    accepted = Accepted(at=[0.0] * chain)
    if first < num_places:
        visits[first] = 1.0
    for place in range(first, num_places):
        at = reached[place]
        exactly = np.append(np.concatenate(([1.0], at[:-1])) - at, at[-1])
        visits[place + 1 : place + chain + 2] += visits[place] * exactly
        accepted.passes += visits[place]
        accepted.at = [total + visits[place] * share for total, share in zip(accepted.at, at, strict=True)]
    return accepted


@torch.no_grad()
def judge(
    student: StandaloneStudent | HeadStudent, teacher: Teacher, texts: Sequence[Text], chain: int, batch_tokens: int
) -> dict[str, dict[str, Accepted]]:
    """What a server accepts of chains of `chain` drafts, all verified, by the texts' temperature and kind ("overall": of all).

    Greedily a draft is accepted where it is the text's token. Of a sampled text, which the target drew, a draft is accepted
    with the chance that both draw this token with the noise they share.
    """
    found: dict[str, dict[str, Accepted]] = {}
    for part in make_batches(texts, batch_tokens, seed=0):
        batch = pad(part).to(teacher.device)
        states = teacher.read(batch.token_ids)
        temperatures = torch.tensor([text.temperature for text in part], device=teacher.device)
        chances = _chances(student, batch.token_ids, states, temperatures, chain).cpu().numpy()
        for row, text in enumerate(part):
            # The first output token comes with the prompt's pass.
            served = walk(chances[row, : len(text.token_ids) - chain], text.prompt_tokens)
            of_temperature = found.setdefault(f"{text.temperature:g}", {})
            for kind in (text.kind, "overall"):
                of_temperature.setdefault(kind, Accepted()).add(served)
    return found


def _chances(
    student: StandaloneStudent | HeadStudent, token_ids: Tensor, states: TargetStates, temperatures: Tensor, chain: int
) -> Tensor:
    """[texts, length, chain] float32, as `walk` takes them; column i of a chain that begins after token t drafts t + 1 + i."""
    num_texts, length = token_ids.shape
    chances = torch.zeros(num_texts, length, chain, device=token_ids.device)
    for place, drafted in enumerate(student.unroll(token_ids, states, chain)):
        first, last = drafted.first, min(drafted.first + drafted.rows.shape[1], length - 1)
        chance = _chance(student, drafted.rows[:, : last - first], token_ids, states, temperatures, first)
        if student.is_chain:
            chances[:, first - place : last - place, place] = chance
        else:  # what is drafted after a token does not depend on where the chain began
            for i in range(chain):
                chances[:, : last - i, i] = chance[:, i:]
    return chances


def _chance(
    student: StandaloneStudent | HeadStudent,
    rows: Tensor,
    token_ids: Tensor,
    states: TargetStates,
    temperatures: Tensor,
    first: int,
) -> Tensor:
    """[texts, columns], that what is drafted after token `first` and the following ones is the text's next token."""
    columns, ids = rows.shape[1], student.draft_ids
    following = token_ids[:, first + 1 : first + 1 + columns]
    chance = torch.zeros(following.shape, device=rows.device)
    for row in range(len(rows)):  # one text's laws at a time: vocabularies are large
        logits, token = student.read_logits(rows[row]).float(), following[row]
        if ids is None:
            own, is_known = token, token < logits.shape[1]
        else:
            own = torch.searchsorted(ids, token).clamp(max=len(ids) - 1)
            is_known = ids[own] == token
        own = torch.where(is_known, own, 0)
        if temperatures[row] == 0:
            chance[row] = ((logits.argmax(-1) == own) & is_known).float()
            continue
        p = (states.logits[row, first : first + columns].float() / temperatures[row]).softmax(-1)
        p = p[:, : logits.shape[1]] if ids is None else p[:, ids]
        q = F.softmax(logits / temperatures[row], dim=-1)
        chance[row] = torch.where(is_known, agreement_on(p, q, own), 0.0)
    return chance
