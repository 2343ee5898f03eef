"""A plugin for SGLang: in every process of a server, CUDA computes on the host."""

from __future__ import annotations

import json
import os
from pathlib import Path


def load() -> None:
    """SGLang calls this in every process of a server."""
    install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _in_phase, HookType.AROUND)


def install() -> None:
    """Take over torch's operators and graphs, Triton, and what FlashInfer and SGLang compile."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from host_cuda.modules import take_over_modules
    from host_cuda.operators import HostOperators
    from host_cuda.recorder import listen, take_over_graphs
    from host_cuda.triton_kernels import take_over_triton

    listen()
    take_over_graphs()
    take_over_triton()
    take_over_modules()
    HostOperators().__enter__()


def _in_phase(original, scheduler, batch, *args, **kwargs):
    """Around the scheduler's run of a batch: the ledger tells prefills from decode steps."""
    from host_cuda.recorder import RECORDER

    mode = getattr(batch, "forward_mode", None)
    phase = "prefill" if mode is not None and mode.is_extend() else "decode"
    with RECORDER.during(phase):
        RECORDER.count("steps")
        result = original(scheduler, batch, *args, **kwargs)
    if folder := os.environ.get("HOST_CUDA_LEDGER"):
        # Whoever stops the server does not wait for its end.
        _write_ledger(Path(folder))
    return result


def _write_ledger(folder: Path) -> None:
    from host_cuda.recorder import RECORDER, count_native

    folder.mkdir(parents=True, exist_ok=True)
    rows = {f"{phase}\t{what}": count for (phase, what), count in sorted(RECORDER.ledger.items())}
    (folder / "ledger.json").write_text(json.dumps({"operations": rows, "native": count_native()}, indent=1) + "\n")
