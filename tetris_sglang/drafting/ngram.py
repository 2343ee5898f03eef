"""N-gram drafts: what followed the last time the request's text ended as it ends now.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), for a whole batch at once, with several
branches and with an estimate of every token's probability, which TETRIS needs to choose between requests.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Prior(NamedTuple):
    """What `estimate_probs` believes before it has counted: everything there is to calibrate.

    A copied token whose text shares n tokens before it with the request's is the target's with probability
        unmatched                            for n = 0
        1 - miss_scale * n ** -miss_decay    for n >= 1
    and that belief is worth `weight` occurrences. Where better branches are wrong, copying often is: the b-th
    further branch keeps (b + 1) ** -branch_decay of what its own occurrences say.
    """

    unmatched: float
    miss_scale: float
    miss_decay: float
    weight: float
    branch_decay: float


# Near what `python scripts/fit_ngram.py` fits on greedy texts of the shipped target (0.032, 0.91, 0.96, 2.2, 0.44): on
# the texts left out of the fit, 2.80 of 5 drafted tokens are accepted and 2.79 expected. That target repeats itself more
# than large models do. On Python sources that it was not trained on, as people wrote them, the same constants expect
# twice what is right, in the right order; a fit there gives 0.008, 1, 0.50, 2.5, 0.91.
PRIOR = Prior(unmatched=0.02, miss_scale=0.9, miss_decay=1.0, weight=2.2, branch_decay=0.6)

# Neither hopeless nor certain: a product over any depth stays above 0, and 1 is never reached.
LEAST_PROB = 1e-4


class NgramProposal(NamedTuple):
    tokens: Tensor
    """[batch, branches, depth] int64; the first tokens of a request's branches differ."""
    probs: Tensor
    """[batch, branches, depth] float32 in (0, 1): the estimated probability that the token is the target's, given
    that those before it on its branch were."""


class Lookup(NamedTuple):
    """Drafts with the evidence for each token: what `estimate_probs` reads, and what a calibration may read."""

    tokens: Tensor
    """[batch, branches, depth] int64."""
    match_lens: Tensor
    """[batch, branches, depth] int64, tokens before this one that the copied text and the request's text share,
    those drafted on the branch included; 0 where a branch only fills up."""
    agreeing: Tensor
    """[batch, branches, depth] int64, of `known` occurrences those that go on with this token."""
    known: Tensor
    """[batch, branches, depth] int64, occurrences matching as long as the branch's own that go on with its tokens up
    to this one, begin with no better branch's token, and whose next token is known (not itself a draft). 0 on a branch
    whose match is empty."""


def propose_by_lookup(
    history: Tensor,
    rows: Tensor,
    lens: Tensor,
    *,
    depth: int,
    branches: int = 1,
    max_match: int = 8,
    window: int | None = None,
    max_matches: int = 32,
) -> NgramProposal:
    """Draft what followed earlier occurrences of each request's last tokens.

    An occurrence is an earlier position of the request's own text. It is the better, the more of the tokens
    before it (up to `max_match`) equal the text's last ones; among equals the more recent one is better. The
    first branch copies what follows the best occurrence. Each further branch copies from the best one whose
    first token no branch has yet. A copy that reaches the end of the text goes on with its own first tokens, as
    in LZ77: an occurrence p tokens before the end continues with period p.

    Every position is an occurrence of the empty match. So where nothing matches, the most recent tokens are
    drafted, beginning with the last one repeated; and when fewer than `branches` distinct tokens have been seen
    among the best `max_matches` occurrences, the smallest unused token ids fill up.

    The probabilities are estimates for greedy targets; see `estimate_probs`.

    Args:
        history: [num_rows, max_len] int32 or int64, each request's prompt and output so far in its row, from
            column 0; columns from the request's length on may hold anything.
        rows: [batch] int32 or int64, the row of each request.
        lens: [batch] int32 or int64 in 1..max_len, known tokens, the newest last. (0 counts as 1, so that padding is
            harmless: garbage is drafted.)
        depth: tokens drafted per branch.
        branches: drafts per request; the vocabulary has at least as many tokens.
        max_match: tokens compared at most, up to 255.
        window: look at the last `window` tokens only, as if the text began there; default: max_len.
        max_matches: occurrences kept as evidence, best first: branches and counts come from these.
    Returns:
        NgramProposal on history's device.
    Raises:
        ValueError: wrong shapes or dtypes, a setting below 1, max_match above 255, or a window of 2**31 /
            (max_match + 1) tokens or more.
    Sync: none; CUDA-graph safe (shapes depend on batch, window and settings only).
    Cost: a copy of the windows, two passes over them per compared token, six more, and a top-k of `max_matches`.
        Up to 16 bytes per token of the windows at once, beside what top-k takes. All that follows is small: batch *
        max_matches * depth per branch. The whole width of the windows is paid for, however short the texts are.
    Example: a row 1 2 3 9 1 2 4 1 2, depth 3
        branches 1 -> tokens [[4, 1, 2]]; branches 2 -> [[4, 1, 2], [3, 9, 1]]
    """
    lookup = look_up(
        history,
        rows,
        lens,
        depth=depth,
        branches=branches,
        max_match=max_match,
        window=window,
        max_matches=max_matches,
    )
    return NgramProposal(lookup.tokens, estimate_probs(lookup.match_lens, lookup.agreeing, lookup.known))


def look_up(
    history: Tensor,
    rows: Tensor,
    lens: Tensor,
    *,
    depth: int,
    branches: int = 1,
    max_match: int = 8,
    window: int | None = None,
    max_matches: int = 32,
) -> Lookup:
    """The drafts of `propose_by_lookup` with the evidence for them instead of probabilities.

    Args, Raises, Sync, Cost: as there.
    Example: a row 1 2 3 9 1 2 4 1 2, depth 3, branches 2
        -> match_lens [[2, 3, 4], [2, 3, 4]], agreeing [[1, 1, 1], [1, 1, 1]], known [[2, 1, 1], [1, 1, 1]]
    """
    _check(history, rows, lens, depth, branches, max_match, window, max_matches)
    windows, known_lens = take_windows(history, rows, lens, window)
    starts, match_lens = rank_occurrences(windows, known_lens, max_match, max_matches)
    batch, count = starts.shape
    device = history.device

    # From here on everything is small: [batch, count], [batch, count, depth], [batch, branches, count, depth].
    steps = torch.arange(depth, dtype=torch.int32, device=device)
    continuations, periods = copy_on(windows, known_lens, starts, steps)
    is_known = steps < periods

    # Each branch copies the best occurrence that is open to it, the first one in rank: no better branch begins so.
    first_tokens = continuations[:, :, 0]
    order = torch.arange(count, device=device)
    open_ = match_lens >= 0
    picks, opens = [starts.new_zeros(batch, 1)], [open_]
    for _ in range(branches - 1):
        taken = first_tokens.gather(1, picks[-1].clamp_max(count - 1))
        open_ = open_ & (first_tokens != taken)
        picks.append(torch.where(open_, order, count).amin(dim=1, keepdim=True))
        opens.append(open_)
    pick, open_ = torch.cat(picks, dim=1), torch.stack(opens, dim=1)
    exists = pick < count
    pick = pick.clamp_max_(count - 1)
    tokens = continuations.gather(1, pick[:, :, None].expand(-1, -1, depth))
    match_len = match_lens.gather(1, pick)
    if branches > 1:
        tokens = torch.where(
            exists[:, :, None], tokens, _find_unused_ids(tokens[:, :, 0], exists)[:, :, None]
        )

    # Rivals match as long as the branch's own occurrence. That a token occurs somewhere says little: an empty match
    # has none. A column of `agree` stands for rivals that go on with the branch's tokens up to there.
    rivals = open_ & (match_lens[:, None] == match_len[:, :, None]) & (match_lens > 0)[:, None]
    same = (continuations[:, None] == tokens[:, :, None]) & is_known[:, None] & rivals[..., None]
    agree = same.cumprod(dim=3, dtype=torch.uint8).view(torch.bool)
    known = torch.cat((rivals[..., None], agree[..., :-1]), dim=3) & is_known[:, None]
    return Lookup(
        tokens,
        torch.where(exists[:, :, None], match_len[:, :, None] + steps, 0),
        agree.sum(dim=2),
        known.sum(dim=2),
    )


def trust_match_lens(match_lens: Tensor, prior: Prior = PRIOR) -> Tensor:
    """What to believe of tokens whose text shares so many with the request's: integers -> float32 of the same shape. Sync: none."""
    trust = 1 - prior.miss_scale * match_lens.clamp_min(1).to(torch.float32) ** -prior.miss_decay
    return torch.where(match_lens > 0, trust, prior.unmatched)


def copy_on(windows: Tensor, known_lens: Tensor, starts: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """What follows each of `starts` [batch, count] in the windows, as LZ77 copies beyond their ends.

    Args:
        steps: [depth] int32, 0, 1, ...
    Returns:
        [batch, count, depth] int64; periods [batch, count, 1] int32: from that step on tokens are copied once more.
    """
    # Divisions in int32: a CPU takes several times longer over int64.
    periods = (known_lens[:, None] - starts).clamp_min_(1).to(torch.int32)[:, :, None]
    copied_from = starts[:, :, None] + steps % periods
    return windows.gather(1, copied_from.flatten(1)).view_as(copied_from).to(torch.int64), periods


def _find_unused_ids(first_tokens: Tensor, exists: Tensor) -> Tensor:
    """First tokens [batch, branches] for branches that found nothing: the smallest ids that no branch has, in order.

    Those branches are the last ones of a request. What stands at the others means nothing.
    """
    branches = first_tokens.shape[1]
    ids = torch.arange(branches, device=first_tokens.device)
    is_used = ((first_tokens[:, :, None] == ids) & exists[:, :, None]).any(dim=1)
    unused_first = (ids + branches * is_used).sort(dim=1).values
    rank = ids - exists.sum(dim=1, keepdim=True)
    return unused_first.gather(1, rank.clamp_min_(0))


def estimate_probs(match_lens: Tensor, agreeing: Tensor, known: Tensor, prior: Prior = PRIOR) -> Tensor:
    """How likely each drafted token is the target's, given that those before it on its branch are.

    A share of occurrences, with a prior that says how far a match of that length is to be trusted:
        (agreeing + weight * trust(match_len)) / (known + weight)
    Within a branch it rises with the match length, and with the agreeing ones of as many known ones. The first
    token of a further branch gets its share (`Prior.branch_decay`) of what better branches leave over, so that
    the branches of a request never add up to more than 1 (but for LEAST_PROB).

    Args:
        match_lens, agreeing, known: [batch, branches, depth] integers, as in `Lookup`.
        prior: what to believe before counting.
    Returns:
        probs: [batch, branches, depth] float32 in [LEAST_PROB, 1 - LEAST_PROB].
    Sync: none; CUDA-graph safe.
    """
    trust = trust_match_lens(match_lens, prior)
    probs = (agreeing + prior.weight * trust) / (known + prior.weight)

    if probs.shape[1] > 1:
        order = torch.arange(1, probs.shape[1] + 1, dtype=torch.float32, device=probs.device)
        kept = torch.where(match_lens[:, :, 0] > 0, order**-prior.branch_decay, 1.0)
        first = probs[:, :, 0] * kept
        probs[:, :, 0] = first
        probs[:, 1:, 0] *= (1 - first[:, :-1]).cumprod(dim=1)
    return probs.clamp_(LEAST_PROB, 1 - LEAST_PROB)


def take_windows(history: Tensor, rows: Tensor, lens: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Each request's last tokens from column 0 on [batch, width] int32, and how many of them are known [batch] int64."""
    max_len = history.shape[1]
    known_lens = lens.to(torch.int64).clamp(1, max_len)
    if window is None or window >= max_len:
        return history.index_select(0, rows).to(torch.int32), known_lens
    first = (known_lens - window).clamp_min(0)
    # A view of every window of every row: indexing it copies whole windows, not token by token.
    windows = history.unfold(1, window, 1)[rows.to(torch.int64), first]
    return windows.to(torch.int32), known_lens.clamp_max(window)


def rank_occurrences(
    windows: Tensor, known_lens: Tensor, max_match: int, max_matches: int
) -> tuple[Tensor, Tensor]:
    """Each request's best occurrences, best first: longest match, then most recent.

    Returns:
        starts: [batch, count] int64, the column behind the matching tokens; count = min(max_matches, width).
        match_lens: [batch, count] int64, 0..max_match; below 0 where the text has not so many positions.
    """
    width = windows.shape[1]
    device = windows.device
    newest_first = (known_lens[:, None] - 1 - torch.arange(max_match, device=device)).clamp_min(0)
    suffix = windows.gather(1, newest_first)[:, :, None].unbind(1)

    # Column c of `lengths` stands for the text before c; of `same`, for whether the token `back` + 1 before c
    # matches. From the farthest token to the nearest: the match gets one longer, or is none. Where a known column
    # has that many tokens before it, so has the text's end: what the clamp put into `suffix` before the text's
    # beginning decides nothing. (All in int32: torch compares vectors only into the inputs' own dtype.)
    lengths = torch.zeros_like(windows)
    scratch = torch.empty_like(windows)
    for back in reversed(range(min(max_match, width - 1))):
        columns = width - 1 - back
        same = torch.eq(windows.narrow(1, 0, columns), suffix[back], out=scratch.narrow(1, back + 1, columns))
        longer = lengths.narrow(1, back + 1, columns)
        torch.addcmul(same, same, longer, out=longer)

    # One number that sorts by length, then by recency; below 0 where nothing is known.
    positions = torch.arange(width, dtype=torch.int32, device=device)
    unknown = torch.ge(positions, known_lens[:, None].to(torch.int32), out=scratch)
    ranks = lengths.mul_(width).add_(positions).sub_(unknown, alpha=width * (max_match + 1))
    # Reversed, because top-k on a CPU is several times slower on rising ranks, which most texts have: few
    # positions match at all.
    best = ranks.flip(1).topk(min(max_matches, width), dim=1)
    match_lens = best.values.div(width, rounding_mode="floor").to(torch.int64)
    return width - 1 - best.indices, match_lens


def _check(
    history: Tensor,
    rows: Tensor,
    lens: Tensor,
    depth: int,
    branches: int,
    max_match: int,
    window: int | None,
    max_matches: int,
) -> None:
    integers = (torch.int32, torch.int64)
    if history.ndim != 2 or history.dtype not in integers or history.shape[1] < 1:
        raise ValueError(
            f"history must be int32 or int64 [num_rows, max_len], got {history.dtype} {tuple(history.shape)}"
        )
    if rows.ndim != 1 or rows.shape != lens.shape or {rows.dtype, lens.dtype} - set(integers):
        raise ValueError(
            f"rows and lens must be int32 or int64 [batch], got {rows.dtype} {tuple(rows.shape)} and "
            f"{lens.dtype} {tuple(lens.shape)}"
        )
    if not 1 <= max_match <= 255:
        raise ValueError(f"max_match must be in 1..255, got {max_match}")
    width = history.shape[1] if window is None else min(window, history.shape[1])
    if width * (max_match + 1) >= 2**31:
        raise ValueError(f"a window of {width} tokens is too long for max_match {max_match}: give window")
    settings = {"depth": depth, "branches": branches, "window": window, "max_matches": max_matches}
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
