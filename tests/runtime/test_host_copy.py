"""The host reads what has come in from the device, and waits for nothing."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tetris_sglang.runtime.host_copy import HostCopy, send


def test_on_the_cpu_there_is_nothing_to_copy():
    tensors = torch.arange(3), torch.ones(2)
    copied = HostCopy(*tensors)
    assert copied.is_ready and copied.tensors == tensors


def test_on_cuda_it_is_ready_when_the_copies_are_done(monkeypatch):
    done = []

    class OnDevice:
        is_cuda = True

        def to(self, device: str, *, non_blocking: bool) -> str:
            assert device == "cpu" and non_blocking
            done.append("copy")
            return "on the host"

    event = SimpleNamespace(record=lambda: done.append("event"), query=lambda: has_passed)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    has_passed = False
    copied = HostCopy(OnDevice(), OnDevice())
    # The event stands behind both copies.
    assert done == ["copy", "copy", "event"] and not copied.is_ready
    has_passed = True
    assert copied.is_ready and copied.tensors == ("on the host", "on the host")


def test_what_is_sent_arrives():
    assert send([3, 1, 2], "cpu").tolist() == [3, 1, 2] and send([3, 1], "cpu").dtype == torch.int64
    assert send([0.5, 2.0], "cpu").dtype == torch.float32
    assert send(torch.tensor([[True, False]]), torch.device("cpu")).tolist() == [[True, False]]


def test_what_is_sent_to_cuda_is_pinned_first(monkeypatch):
    done = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: done.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: done.append((device, non_blocking)) or self)
    send([1, 2], "cuda")
    assert done == ["pin", ("cuda", True)]
