"""What TETRIS counts: drafted, selected and accepted tokens, per process (Prometheus, /server_info) and per request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from sglang.srt.runtime_context import get_observability

from tetris_sglang.config import is_tetris
from tetris_sglang.observers import Observer, StepRecord

COUNTERS = {
    "num_steps": ("steps", "Steps."),
    "plain_steps": ("plain_steps", "Steps that verified no draft."),
    "num_requests": ("request_steps", "Requests, summed over steps."),
    "num_drafting_requests": ("drafting_request_steps", "Requests, summed over the steps that drafted."),
    "drafted_tokens": ("drafted_tokens", "Draft tokens proposed. Bonus tokens count nowhere."),
    "selected_tokens": ("selected_tokens", "Draft tokens verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens kept."),
    "verified_rows": ("verified_rows", "Rows of the target's passes, roots and what fills a graph included."),
}
"""What is counted: its name in /server_info, in Prometheus (sglang:tetris_NAME_total), and what it is."""
ACCEPTED_AT_POSITION = "accepted_at_position", "Requests, summed over steps, that had a draft of this position accepted."
PHASE_SECONDS = "phase_seconds", "Time of a step's phases (--speculative-tetris-phase-times)."
GAUGES = {
    "batch_size": "Requests of the last step.",
    "draft_depth": "Levels drafted in the last step.",
    "capacity_tokens": "Draft tokens verified in the last step.",
    "expected_gain": "Of the best speculative plan against plain decoding, as last estimated (automatic capacity).",
    "step_time_predicted_seconds": "Of the last step timed, as predicted (automatic capacity).",
    "step_time_measured_seconds": "Of the last step timed (automatic capacity).",
}
"""sglang:tetris_NAME in Prometheus."""


class StepMetrics(Observer):
    """An `Observer`: host-side counters of one scheduler process; no device sync.

    Args:
        num_positions: of a draft.
        is_first: of the ranks that do the same; the others export nothing, unless SGLang is asked for all of them.
    """

    def __init__(self, num_positions: int, is_first: bool) -> None:
        self._is_first = is_first
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._last = dict.fromkeys(("batch_size", "draft_depth", "capacity_tokens"), 0)
        self._accepted_at = [0] * num_positions

    def observe(self, record: StepRecord) -> None:
        (depth, selected), batch_size = record.plan, len(record.batch.reqs)
        self._count("num_steps", 1)
        self._count("num_requests", batch_size)
        self._count("verified_rows", len(record.packed.input_ids))
        if selected:
            self._count("num_drafting_requests", batch_size)
            self._count("drafted_tokens", record.proposal.tokens.numel())
            self._count("selected_tokens", selected)
        else:
            self._count("plain_steps", 1)
        self._last = {"batch_size": batch_size, "draft_depth": depth, "capacity_tokens": selected}
        for name, value in self._last.items():
            self.set(name, value)

    def set(self, gauge: str, value: float) -> None:
        """One of `GAUGES`."""
        if self._prometheus is not None:
            self._prometheus[gauge].set(value)

    def count_accepted(self, num_accepted: Sequence[int]) -> None:
        """Drafts that each request of a step had accepted have become known."""
        self._count("accepted_tokens", sum(num_accepted))
        for position in range(max(num_accepted, default=0)):
            reached = sum(n > position for n in num_accepted)
            self._accepted_at[position] += reached
            if self._prometheus is not None:
                self._prometheus[ACCEPTED_AT_POSITION[0]].labels(position + 1).inc(reached)

    def count_phase(self, phase: str, seconds: float) -> None:
        if self._prometheus is not None:
            self._prometheus[PHASE_SECONDS[0]].labels(phase).inc(seconds)

    def _count(self, name: str, value: int) -> None:
        self._counts[name] += value
        if value and self._prometheus is not None:
            self._prometheus[name].inc(value)

    def summarise(self) -> dict[str, float | list[int]]:
        return {**self._counts, **self._last, ACCEPTED_AT_POSITION[0]: self._accepted_at}

    @cached_property
    def _prometheus(self):
        wanted = get_observability()
        if not wanted.enable_metrics or not (self._is_first or wanted.enable_metrics_for_all_schedulers):
            return None
        # Imported late: SGLang sets the multiprocess directory before the first metric exists.
        from prometheus_client import Counter, Gauge

        metrics = {key: Counter(f"sglang:tetris_{name}", text) for key, (name, text) in COUNTERS.items()}
        for (name, text), label in ((ACCEPTED_AT_POSITION, "position"), (PHASE_SECONDS, "phase")):
            metrics[name] = Counter(f"sglang:tetris_{name}", text, [label])
        for name, text in GAUGES.items():
            metrics[name] = Gauge(f"sglang:tetris_{name}", text, multiprocess_mode="mostrecent")
        return metrics


def add_internal_state(_result, controller, state: dict) -> None:
    """AFTER hook of SGLang's internal-state readback: adds a `tetris` section to /server_info."""
    reports = getattr(controller.scheduler.draft_worker, "tetris_reports", ())
    if reports:
        state["tetris"] = {name: value for part in reports for name, value in part.summarise().items()}


def add_request_meta_info(_result, manager, meta_info: dict, recv_obj, i: int) -> None:
    """AFTER hook of TokenizerManager._calculate_spec_decoding_metrics: drafted and selected tokens of one request.

    SGLang takes every step for one of --speculative-num-steps drafts; the worker says how many there were (in
    block_accept_lens), and how many rows were verified, roots included (in cap_lens).
    """
    if not is_tetris(manager.server_args.speculative_algorithm) or "spec_verify_ct" not in meta_info:
        return
    drafted = recv_obj.spec_num_block_accept_tokens[i]
    selected = recv_obj.spec_num_cap_tokens[i] - meta_info["spec_verify_ct"]
    accepted = meta_info["spec_num_correct_drafts"]
    meta_info["spec_num_proposed_drafts"] = drafted
    meta_info["spec_accept_rate"] = accepted / drafted if drafted else 0.0
    meta_info["spec_num_selected_drafts"] = selected
    meta_info["spec_verify_success_rate"] = accepted / selected if selected else None
