"""What TETRIS counts: drafted, selected and accepted tokens, per process (Prometheus, /server_info) and per request."""

from __future__ import annotations

from functools import cached_property

from sglang.srt.runtime_context import get_observability
from torch import Tensor

from tetris_sglang.config import is_tetris
from tetris_sglang.observers import StepRecord


class StepMetrics:
    """An `Observer`: host-side counters of one scheduler process; no device sync.

    drafted: tokens proposed by the draft. selected: those verified. accepted: those kept. Bonus tokens count nowhere.

    Args:
        is_first: of the ranks that do the same; the others export nothing, unless SGLang is asked for all of them.
    """

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first
        self.num_steps = 0
        self.num_requests = 0
        self.drafted = 0
        self.selected = 0
        self.accepted = 0
        self.verified_rows = 0
        self.plain_steps = 0

    def begin(self, batch, next_token_ids: Tensor) -> None:
        """A prefill counts for nothing."""

    def observe(self, record: StepRecord) -> None:
        (depth, selected), batch_size = record.plan, len(record.batch.reqs)
        drafted = 0 if record.proposal is None else record.proposal.tokens.numel()
        verified_rows = len(record.packed.input_ids)
        self.num_steps += 1
        self.plain_steps += selected == 0
        self.num_requests += batch_size
        self.drafted += drafted
        self.selected += selected
        self.verified_rows += verified_rows
        if self._prometheus is not None:
            self._prometheus["drafted"].inc(drafted)
            self._prometheus["selected"].inc(selected)
            self._prometheus["depth"].set(depth)
            self._prometheus["capacity"].set(selected)
            if selected == 0:
                self._prometheus["plain_steps"].inc()

    def observe_step_time(self, predicted_s: float, measured_s: float) -> None:
        """A step's time has become known (automatic capacity)."""
        if self._prometheus is not None:
            self._prometheus["predicted"].set(predicted_s)
            self._prometheus["measured"].set(measured_s)

    def count_accepted(self, accepted: int) -> None:
        self.accepted += accepted
        if self._prometheus is not None:
            self._prometheus["accepted"].inc(accepted)

    def summarise(self) -> dict[str, float]:
        return {
            "num_steps": self.num_steps,
            # Those that drafted nothing.
            "plain_steps": self.plain_steps,
            "num_requests": self.num_requests,
            "drafted_tokens": self.drafted,
            "selected_tokens": self.selected,
            "accepted_tokens": self.accepted,
            # Rows of the target's passes: selected drafts and one root per request.
            "verified_rows": self.verified_rows,
        }

    @cached_property
    def _prometheus(self):
        wanted = get_observability()
        if not wanted.enable_metrics or not (self._is_first or wanted.enable_metrics_for_all_schedulers):
            return None
        # Imported late: SGLang sets the multiprocess directory before the first metric exists.
        from prometheus_client import Counter, Gauge

        metrics = {
            name: Counter(f"sglang:tetris_{name}_tokens", f"Draft tokens {name} under TETRIS.")
            for name in ("drafted", "selected", "accepted")
        }
        metrics["plain_steps"] = Counter("sglang:tetris_plain_steps", "Steps without drafting under TETRIS.")
        for name, unit_name, help_text in (
            ("depth", "draft_depth", "Passes of the draft in the last step."),
            ("capacity", "capacity_tokens", "Draft tokens verified in the last step."),
            ("predicted", "step_time_predicted_seconds", "Of the last step timed, as predicted."),
            ("measured", "step_time_measured_seconds", "Of the last step timed."),
        ):
            metrics[name] = Gauge(f"sglang:tetris_{unit_name}", help_text, multiprocess_mode="mostrecent")
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
