"""N-gram drafts as they are defined, for one request, in plain Python: what `ngram` must equal."""

from collections.abc import Sequence
from typing import NamedTuple

from tetris_sglang.drafting.ngram import LEAST_PROB, PRIOR


class ReferenceBranch(NamedTuple):
    """One branch's [depth] values; see `ngram.Lookup`."""

    tokens: list[int]
    match_lens: list[int]
    agreeing: list[int]
    known: list[int]


def look_up_reference(
    text: Sequence[int],
    *,
    depth: int,
    branches: int = 1,
    max_match: int = 8,
    window: int | None = None,
    max_matches: int = 32,
) -> list[ReferenceBranch]:
    """The branches of one request, best first.

    Args:
        text: the request's known tokens, at least one, the newest last.
        depth, branches, max_match, window, max_matches: as in `propose_by_lookup`.
    Returns:
        [branches] ReferenceBranch.
    Example: [1, 2, 3, 9, 1, 2, 4, 1, 2], depth 3 -> tokens [4, 1, 2]
    """
    text = list(text if window is None else text[-window:])

    def count_shared(start: int) -> int:
        """Tokens before `start` that equal the text's last ones."""
        shared = 0
        while shared < min(max_match, start) and text[start - 1 - shared] == text[-1 - shared]:
            shared += 1
        return shared

    def copy_from(start: int) -> list[int]:
        """As LZ77 copies: token by token, so that it may read what it has just written."""
        extended = list(text)
        for step in range(depth):
            extended.append(extended[start + step])
        return extended[len(text) :]

    occurrences = sorted(range(len(text)), key=lambda start: (-count_shared(start), -start))[:max_matches]
    result: list[ReferenceBranch] = []
    while len(result) < branches:
        taken = {branch.tokens[0] for branch in result}
        rivals = [start for start in occurrences if text[start] not in taken]
        if not rivals:
            unused = min(set(range(branches)) - taken)
            result.append(ReferenceBranch([unused] * depth, [0] * depth, [0] * depth, [0] * depth))
            continue
        shared = count_shared(rivals[0])
        branch = ReferenceBranch(copy_from(rivals[0]), [shared + step for step in range(depth)], [], [])
        equals = [start for start in rivals if count_shared(start) == shared > 0]
        for step, token in enumerate(branch.tokens):
            so_far = branch.tokens[:step]
            going_on = [
                text[start + step]
                for start in equals
                if text[start:][:step] == so_far and start + step < len(text)
            ]
            branch.known.append(len(going_on))
            branch.agreeing.append(going_on.count(token))
        result.append(branch)
    return result


def propose_by_lookup_reference(
    text: Sequence[int],
    *,
    depth: int,
    branches: int = 1,
    max_match: int = 8,
    window: int | None = None,
    max_matches: int = 32,
) -> list[tuple[list[int], list[float]]]:
    """(tokens, probs) of each branch of one request; arguments as in `look_up_reference`."""
    found = look_up_reference(
        text, depth=depth, branches=branches, max_match=max_match, window=window, max_matches=max_matches
    )
    proposal, left_over = [], 1.0
    for order, branch in enumerate(found, start=1):
        probs = [
            (agreeing + PRIOR.weight * _trust(match_len)) / (known + PRIOR.weight)
            for match_len, agreeing, known in zip(
                branch.match_lens, branch.agreeing, branch.known, strict=True
            )
        ]
        if branch.match_lens[0] > 0:
            probs[0] *= order**-PRIOR.branch_decay
        probs[0], left_over = probs[0] * left_over, left_over * (1 - probs[0])
        proposal.append((branch.tokens, [min(max(prob, LEAST_PROB), 1 - LEAST_PROB) for prob in probs]))
    return proposal


def _trust(match_len: int) -> float:
    return 1 - PRIOR.miss_scale * match_len**-PRIOR.miss_decay if match_len > 0 else PRIOR.unmatched
