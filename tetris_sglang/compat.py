"""The SGLang releases that this package works with; requirements.txt and pyproject.toml pin one of them."""

from __future__ import annotations

from importlib import metadata

SUPPORTED_SGLANG = ("0.5.23",)


def check_sglang_version() -> str:
    """Return the installed SGLang version.

    Raises:
        RuntimeError: it is missing or not supported; names the version and the way out.
    """
    supported = " or ".join(SUPPORTED_SGLANG)
    way_out = f"Install a supported one: pip install 'sglang=={SUPPORTED_SGLANG[-1]}'."
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"SGLang is not installed; tetris-sglang needs {supported}. {way_out}") from None
    if installed not in SUPPORTED_SGLANG:
        raise RuntimeError(
            f"SGLang {installed} is installed; tetris-sglang builds on internals of {supported} and does not work "
            f"with another release. {way_out}"
        )
    return installed
