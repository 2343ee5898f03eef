"""What is compared: one server configuration each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REFERENCE, CONTROL = "none", "control"
FAMILIES = (REFERENCE, CONTROL, "sglang", "adaptive", "full", "tetris", "uniform", "random", "auto")
"""control: a second server without speculation, whose ratio to the first shows chance alone. sglang: SGLang's own speculation
with the arm's draft."""
HEADS = ("eagle3", "eagle")
DRAFTS = (*HEADS, "ngram", "standalone", "dflash", "useless")
"""useless: the eagle3 head as sure as ever, its tokens mixed up."""


@dataclass(frozen=True)
class Arm:
    """One server configuration.

    k: drafts verified per request and step, on average. extra: drafts beyond k that selection chooses from.
    capacity_tokens: instead of k, drafts verified per step over the whole batch, of num_steps drafted per request.
    draft: what drafts, one of DRAFTS. topk: of SGLang's own: branches of a draft tree, which is num_steps deep; 1: chains.
    num_draft_tokens: of auto: columns per request, the root included; 0: the server's default.
    variant: of auto: one TETRIS setting that differs from its default, NAME=VALUE without --speculative-tetris-.
    """

    family: str
    k: int = 0
    extra: int = 0
    capacity_tokens: int = 0
    num_steps: int = 0
    draft: str = DRAFTS[0]
    topk: int = 1
    num_draft_tokens: int = 0
    variant: str = ""

    @property
    def name(self) -> str:
        if not self.speculates:
            return self.family
        name = f"{self.family} {self.draft}"
        if self.family == "sglang":
            name = self.algorithm + (" useless" if self.draft == "useless" else "")
        if self.topk > 1:
            name += f" topk={self.topk}"
        if self.family == "adaptive":
            return name
        if self.family == "auto":
            name += f" D={self.num_steps}" + (f" of {self.num_draft_tokens}" if self.num_draft_tokens else "")
            return f"{name} {self.variant}".strip()
        if self.family == "full":
            return f"{name} D={self.k}"
        if self.capacity_tokens:
            return f"{name} C={self.capacity_tokens}, D={self.num_steps}"
        return f"{name} k={self.k}" + (f"+{self.extra}" if self.extra else "")

    @property
    def speculates(self) -> bool:
        return self.family not in (REFERENCE, CONTROL)

    @property
    def algorithm(self) -> str:
        """SGLang's own with this draft."""
        return "EAGLE3" if self.draft == "useless" else self.draft.upper()

    def flags(self, draft: str | None, phase_times: bool) -> list[str]:
        """Server flags beyond the model's.

        Args:
            draft: the draft's folder; None for n-grams.
        """
        if not self.speculates:
            return []
        model = ["--speculative-draft-model-path", draft] if draft else []
        if self.family == "adaptive":
            # Steps and their candidates are SGLang's: a number of ours may be none of them.
            return ["--speculative-algorithm", self.algorithm, *model, "--speculative-adaptive"]
        drafting = [*model, "--speculative-num-steps", str(self.num_steps or self.k + self.extra)]
        if self.family == "sglang":
            num_draft_tokens = ("--speculative-num-draft-tokens", str(self.k + 1))
            if self.draft == "dflash":  # a block, all of which is verified
                return ["--speculative-algorithm", self.algorithm, *model, *num_draft_tokens]
            branches = ("--speculative-eagle-topk", str(self.topk)) if self.draft != "ngram" else ()
            return ["--speculative-algorithm", self.algorithm, *drafting, *branches, *num_draft_tokens]
        if self.family == "auto":
            if self.num_draft_tokens:
                drafting += ["--speculative-num-draft-tokens", str(self.num_draft_tokens)]
            if self.variant:
                setting, _, value = self.variant.partition("=")
                drafting += [f"--speculative-tetris-{setting}", value]
            return ["--speculative-algorithm", "TETRIS", *drafting]
        return [
            *("--speculative-algorithm", "TETRIS", *drafting),
            *(
                ("--speculative-tetris-capacity-tokens", str(self.capacity_tokens))
                if self.capacity_tokens
                else ("--speculative-tetris-capacity-per-request", str(self.k))
            ),
            # In full there is nothing to choose.
            *("--speculative-tetris-selection", "tetris" if self.family == "full" else self.family),
            *(("--speculative-tetris-phase-times", "true") if phase_times else ()),
        ]


def group_arms(arms: Sequence[Arm], live_servers: int) -> list[list[Arm]]:
    """Split into groups of at most `live_servers`, each with the reference; one group if they follow one another."""
    if live_servers == 1:
        return [list(arms)]
    reference, *others = arms
    size = live_servers - 1
    return [[reference, *others[i : i + size]] for i in range(0, len(others), size)] or [[reference]]


def order_arms(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """Reverse every other one, and rotate after each such pair: no arm always follows the same one."""
    start = repeat // 2 % len(arms)
    rotated = [*arms[start:], *arms[:start]]
    return rotated[::-1] if repeat % 2 else rotated
