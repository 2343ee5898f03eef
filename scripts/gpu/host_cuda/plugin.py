"""A plugin for SGLang: in every process of a server, CUDA computes on the host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


def load() -> None:
    """SGLang calls this in every process of a server."""
    install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _in_phase, HookType.AROUND)
    pool = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__"
    HookRegistry.register(pool, _exempt_table, HookType.AFTER)


def install() -> None:
    """Take over torch's operators and graphs, Triton, what FlashInfer and SGLang compile, and collectives."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from host_cuda.collectives import take_over_collectives
    from host_cuda.modules import take_over_modules
    from host_cuda.operators import HostOperators
    from host_cuda.recorder import listen, take_over_graphs
    from host_cuda.streams import ARE_CHECKED, take_over_streams
    from host_cuda.triton_kernels import take_over_triton

    torch.cuda._sleep = lambda cycles: None  # nothing is computed by it
    listen()
    take_over_graphs()
    take_over_triton()
    take_over_modules()
    take_over_collectives()
    if ARE_CHECKED:
        take_over_streams()
    HostOperators().__enter__()


def _in_phase(original, scheduler, batch, *args, **kwargs):
    """Around the scheduler's run of a batch: the ledger tells prefills from decode steps."""
    from host_cuda.recorder import RECORDER, count_native

    mode = getattr(batch, "forward_mode", None)
    phase = "prefill" if mode is not None and mode.is_extend() else "decode"
    with RECORDER.during(phase):
        RECORDER.count("steps")
        before = count_native()
        result = original(scheduler, batch, *args, **kwargs)
        for what, count in count_native().items():
            if times := count - before.get(what, 0):
                RECORDER.ledger[phase, "", what] += times
    if (folder := os.environ.get("HOST_CUDA_LEDGER")) and torch.cuda.current_device() == 0:
        # Whoever stops the server does not wait for its end.
        _write_ledger(Path(folder))
    return result


def _exempt_table(result, pool, *_, **__):
    """After the table of the requests' slots is made."""
    from host_cuda.memory import on_host
    from host_cuda.streams import STREAMS

    STREAMS.exempt(on_host(pool.req_to_token))
    return result


def _write_ledger(folder: Path) -> None:
    from host_cuda.recorder import RECORDER
    from host_cuda.streams import STREAMS

    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"phase": phase, "caller": caller, "what": what, "count": count}
        for (phase, caller, what), count in sorted(RECORDER.ledger.items())
    ]
    (folder / "ledger.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "races.json").write_text(json.dumps(STREAMS.races, indent=1) + "\n")
