"""Where what was made or fetched once is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$SGLANG_TETRIS_CACHE, else ~/.cache/tetris_sglang, else, where a container's user has no home, a temporary one."""
    if given := os.environ.get("SGLANG_TETRIS_CACHE"):
        return Path(given)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "tetris_sglang"
