"""A second opinion on a model's drafts, from the text: what followed the last time it stood as it stands now.

A text that repeats itself (a loop, a quotation, code that is edited) tells apart drafts whose scores do not: where the
longest earlier match of the text's end goes on as the draft does, the draft is accepted far more often than where the
match goes on differently. So every drafted token carries what the match says of it, and whether it was the model's first
choice: one of NUM_EVIDENCE kinds. What each kind is worth is learnt (estimates/offsets.py). Where the match's own token is
then the likelier one, it is drafted in the place of the model's: the model goes on from there.

Without a model, the matches themselves are the drafts (`drafting.propose_matches`).

Where another request's text shares more than twice as many tokens as the request's own, it is the match
(texts/index.py). What such a one says has kinds of its own: it is worth less.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MAX_MATCH = 8
_LENGTH_CLASSES = 4
"""Match lengths are told apart as 1, 2 to 3, 4 to 7, and more."""
NO_EVIDENCE = 0
"""There is no match, or one before this token was not followed."""
FIRST_COPIED = 1 + 2 * _LENGTH_CLASSES
"""Kinds below: by rising match length two each, the match goes on with this token, or differently. From here on, by
match length: the token is the match's and not the model's."""
FIRST_TEXT_ONLY = FIRST_COPIED + _LENGTH_CLASSES
"""From here on, by match length: no model was asked, the token is the match's."""
_TEXT_ONLY_CLASSES = 5
"""As above, and from 16 tokens on: those that were drafted on the way count as shared."""
NO_DRAFT = FIRST_TEXT_ONLY + _TEXT_ONLY_CLASSES
"""There was no match to draft from: the place holds no draft."""
_KINDS = NO_DRAFT + 1
"""From here on the same again, of matches in other requests' texts."""
FIRST_RUNNER_UP = 2 * _KINDS
"""From here on all of it again, of tokens that were not the model's first choice."""
NUM_EVIDENCE = 2 * FIRST_RUNNER_UP
COPIED_PROB = 0.5
"""What stands for the model's probability of a token that is the match's. Calibrated, it is worth what its kind has been."""
INITIAL_OFFSETS = 2 * (
    *(*[0.0] * FIRST_COPIED, -3.0, -2.5, -2.0, -1.5, -1.5, 0.0, 0.8, 1.7, 2.2, 0.0),
    *(*[0.0] * FIRST_COPIED, -4.0, -3.5, -3.0, -2.5, -2.5, -1.0, 0.0, 0.7, 1.2, 0.0),
)
"""Log-odds of each kind before anything was seen. A copied token counts for little: drafts that contradict the text have to
fail first, so a draft that is always right keeps all of its tokens. Where no model was asked it begins with what such tokens
were worth in sampled answers of SmolLM2-135M-Instruct (0.16, 0.46, 0.69 and 0.90 accepted, by rising match
length)."""


class Calibrate(Protocol):
    """What a draft's probabilities are worth; `estimates.AcceptanceEstimator` learns it."""

    def __call__(self, probs: Tensor, depths: int | Tensor, evidence: Tensor | None) -> Tensor:
        """How likely such tokens are accepted, given that those before them are.

        Args:
            probs: [batch, n] float32. depths: from 1, to be broadcast. evidence: [batch, n] int64; None: there is none.
        """

    def find_rival(self, depths: Tensor, copied: Tensor, contradicted: Tensor) -> Tensor:
        """The draft's probability with which a token with `contradicted` evidence is worth as much as one with `copied`.

        Args:
            depths: [n] int64, from 1. copied, contradicted: [batch, n] int64, kinds of evidence.
        Returns:
            [batch, n] float32.
        """


class _Trust:
    """No calibration: what the draft says, whatever speaks against it."""

    def __call__(self, probs: Tensor, depths: int | Tensor, evidence: Tensor | None) -> Tensor:
        return probs

    def find_rival(self, depths: Tensor, copied: Tensor, contradicted: Tensor) -> Tensor:
        return torch.zeros_like(copied, dtype=torch.float32)


trust = _Trust()


class Match(NamedTuple):
    """Of every request of a batch."""

    tokens: Tensor
    """[batch, depth] int64, what followed."""
    match_lens: Tensor
    """[batch] int64, tokens before these that both places share, 0..MAX_MATCH; 0: there is no match."""
    is_others: Tensor | None = None
    """[batch] bool, whether it stands in another request's text; None: none of them does."""


def is_copied(evidence: Tensor) -> Tensor:
    """Whether tokens with this evidence are the match's and not the model's, or no draft at all."""
    return evidence % _KINDS >= FIRST_COPIED


def _length_exponents(match: Match) -> Tensor:
    """[batch, depth] int64, of the tokens shared before each token the classes: 1 for a length of 1, 2 for 2 to 3, 3 for 4 to
    7."""
    levels = torch.arange(match.tokens.shape[1], device=match.tokens.device)
    lens = (match.match_lens[:, None] + levels).to(torch.float32)
    # The binary exponent is the class.
    return torch.frexp(lens).exponent.to(torch.int64)


def _first_kinds(match: Match) -> Tensor | int:
    """Where the kinds of its evidence begin: [batch, 1] int64, or 0 for all."""
    return 0 if match.is_others is None else match.is_others[:, None] * _KINDS


def text_evidence(match: Match) -> Tensor:
    """[batch, depth] int64, the evidence for a match's tokens where no model is asked."""
    kinds = _length_exponents(match).clamp(1, _TEXT_ONLY_CLASSES) + (FIRST_TEXT_ONLY - 1) + _first_kinds(match)
    return torch.where((match.match_lens > 0)[:, None], kinds, NO_DRAFT)


def trust_match_lens(match_lens: Tensor) -> Tensor:
    """What to believe, without calibration, of tokens before which a text shares so many with the request's.

    Args:
        match_lens: integers; below 1 counts as 1.
    Returns:
        float32, the same shape.
    Sync: none.
    """
    return 1 - 0.9 * match_lens.clamp_min(1).to(torch.float32).reciprocal()


class Choice(NamedTuple):
    """Drafts of some levels after the match was consulted; each [batch, n]."""

    tokens: Tensor
    """int64."""
    probs: Tensor
    """float32, the draft's own, also where its token gave way."""
    was_followed: Tensor
    """bool, or [batch, 1]: whether the match was followed down to the token before."""
    agrees: Tensor
    """bool, whether the draft's token is the match's."""
    is_copied: Tensor
    """bool, whether the match's token has taken its place."""

    @property
    def is_followed(self) -> Tensor:
        """bool, whether the tokens so far are the match's."""
        return self.was_followed & (self.agrees | self.is_copied)


class Matcher:
    """Consults a step's matches while its drafts grow.

    Args:
        match: at least as deep as what is drafted.
        calibrate: what probabilities are worth.
    Sync: none; CUDA-graph safe.
    """

    def __init__(self, match: Match, calibrate: Calibrate) -> None:
        self._calibrate, self._match = calibrate, match
        # For all levels at once: there is little to each, so it costs what launching it takes.
        self._exponents, self._first_kinds = _length_exponents(match), _first_kinds(match)
        classes = self._exponents.clamp_max(_LENGTH_CLASSES)
        self._contradicted = 2 * classes + self._first_kinds
        self._copied = classes + (FIRST_COPIED - 1) + self._first_kinds
        self.exists = (match.match_lens > 0)[:, None]
        """[batch, 1] bool, whether there is one: at level 0 it is followed so far."""

    @cached_property
    def _copy_below(self) -> Tensor:
        """[batch, levels], the draft's probabilities below which the match's tokens are worth more."""
        depths = torch.arange(1, self._copied.shape[1] + 1, device=self._copied.device)
        return self._calibrate.find_rival(depths, self._copied, self._contradicted)

    def choose(self, level: int, tokens: Tensor, probs: Tensor, was_followed: Tensor) -> Choice:
        """Let the match's token take a place.

        If the chain follows the match and none of the tokens does, the match's token takes the place of the last of them,
        provided that it scores higher.

        Args:
            level: from 0.
            tokens, probs: [batch, children], the most likely ones first.
            was_followed: [batch, 1] bool, of the token before them.
        Example: match tokens [[3, 9, 1]], match_lens [2], level 0, tokens [[3, 4]] -> agrees [[T, F]]
        """
        copied = self._match.tokens[:, level, None]
        agrees = tokens == copied
        takes = (probs < self._copy_below[:, level, None]) & was_followed & ~agrees.any(dim=1, keepdim=True)
        takes[:, :-1] = False
        return Choice(torch.where(takes, copied, tokens), probs, was_followed, agrees, takes)

    def score(self, levels: slice, depths: int | Tensor, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
        """Calibrate drafts by what the match says of them.

        Args:
            levels: of the choice's columns: one for all of them, which then stand side by side, or one each. depths: the same
                from 1, as `Calibrate` takes them.
        Returns:
            probs [batch, n] float32, the draft's own, COPIED_PROB where copied; scores [batch, n] float32, calibrated;
            evidence [batch, n] int64 below NUM_EVIDENCE.
        """
        evidence = (self._contradicted[:, levels] - choice.agrees.to(torch.int64)).where(choice.was_followed, NO_EVIDENCE)
        if levels.stop - levels.start == 1:
            is_runner_up = torch.arange(evidence.shape[1], device=evidence.device) > 0
            evidence = evidence + FIRST_RUNNER_UP * is_runner_up
        evidence = torch.where(choice.is_copied, self._copied[:, levels], evidence)
        probs = choice.probs.masked_fill(choice.is_copied, COPIED_PROB)
        return probs, self._calibrate(probs, depths, evidence), evidence
