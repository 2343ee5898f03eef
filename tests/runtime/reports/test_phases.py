"""Where a step's time goes."""

from __future__ import annotations

from tetris_sglang.portable_cpu.activate import activate

activate()  # as SGLang does, before its modules are imported
from tetris_sglang.runtime.reports.phases import PhaseTimer


def test_phase_timer_measures_only_when_enabled():
    for enabled in (False, True):
        reported = []
        phases = PhaseTimer(enabled, lambda phase, _, reported=reported: reported.append(phase))
        for _ in range(2):
            phases.begin_step()
            with phases("draft"):
                sum(range(20_000))
            phases.end_step()
        summary = phases.summarise()
        assert set(summary) == ({"draft_ms", "host_ms"} if enabled else set())
        assert all(ms > 0 for ms in summary.values())
        assert reported == (["draft", "host", "draft"] if enabled else [])
