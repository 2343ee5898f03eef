"""What requests asked and what was written for them, in a file that `tetris-sglang distill --traffic` learns from.

Off unless asked for (--speculative-tetris-record-text): it is users' text. Only tokens and the temperature are in it: no keys,
no headers, nothing that names a user.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from tetris_sglang.observers import Observer

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""Then the file gets the name FILE.1, whose content goes: two of them are the most there is."""
_MAX_REMEMBERED = 4096


class TextRecorder(Observer):
    """An `Observer` that writes finished requests down, each as a line (`tools/distill/corpus.py`).

    Args:
        path: appended to. replica: which of the servers that record beside each other (--dp-size); each has a file of its own.
    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, replica: int | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path.with_name(f"{path.name}.rank{replica}") if replica else path
        self._max_file_bytes = max_file_bytes
        self._running: dict[str, Any] = {}
        """SGLang's requests, by their ids."""
        self._is_open = True
        self._open().close()

    def begin(self, batch, next_token_ids: Tensor) -> None:
        if self._is_open:
            # SGLang tells the end of a request that decodes; one that ends in its prefill has no more than a token.
            self._running = {rid: req for rid, req in self._running.items() if not req.finished()}
            self._running |= {req.rid: req for req in batch.reqs}
            while len(self._running) > _MAX_REMEMBERED:  # aborted in the queue, after a retraction
                del self._running[next(iter(self._running))]

    def finish(self, rid: str) -> None:
        """A request has ended; those that were given up are not written down."""
        req = self._running.pop(rid, None)
        if req is None or not self._is_open or req.finished_reason.to_json()["type"] == "abort":
            return
        entry = {
            "prompt": list(req.origin_input_ids),
            "output": list(req.output_ids_through_stop),
            # SGLang's own for a greedy request is 1, with a top-k of 1.
            "temperature": 0.0 if req.sampling_params.top_k == 1 else req.sampling_params.temperature,
        }
        try:
            if self._path.exists() and self._path.stat().st_size >= self._max_file_bytes:
                os.replace(self._path, self._path.with_name(self._path.name + ".1"))
            with self._open() as file:
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        except OSError:
            # A full disk is no reason to stop serving.
            logger.exception("TETRIS: recording texts ends here")
            self._is_open, self._running = False, {}

    def _open(self):
        # Readable by the server's own user alone.
        return open(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8")
