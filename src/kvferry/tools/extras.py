"""Optional packages that commands need, by the extra of kvferry that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from kvferry.common.errors import ConfigError

# Not a command: what to write after `pip install` depends on whether the user has a checkout or a wheel. On a
# package index, kvferry[vllm] could be somebody else's package until kvferry is published there.
INSTALL_PAGE = "https://github.com/kvferry/kvferry/blob/main/docs/install.md"


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of kvferry, as in ``pip install '.[vllm]'``.

    Attributes:
        modules: names of its packages for users, by the names to import.
        alternative: packages that take its place on machines without CUDA; empty if it works there too.
    """

    name: str
    modules: Mapping[str, str]
    alternative: str = ""

    @property
    def advice(self) -> str:
        """Advice on how to install the packages.

        >>> ROUTER.advice
        "install kvferry's extra router as https://github.com/kvferry/kvferry/blob/main/docs/install.md says"
        """
        alternative = f", or {self.alternative}," if self.alternative else ""
        return f"install kvferry's extra {self.name}{alternative} as {INSTALL_PAGE} says"


ROUTER = Extra(
    "router", {"starlette": "Starlette", "uvicorn": "Uvicorn", "aiohttp": "aiohttp", "httptools": "httptools"}
)
VLLM = Extra("vllm", {"vllm": "vLLM", "nixl": "NIXL", **ROUTER.modules}, "vLLM's build for CPUs")
BENCH = Extra("bench", {"torch": "torch", "nixl": "NIXL"})


def require(command: str, extra: Extra) -> None:
    """Raise ConfigError if a package of an extra that a command needs is not installed. Import nothing."""
    for module, name in extra.modules.items():
        if not _is_installed(module):
            raise ConfigError(f"{command} needs {name}, which is not installed; {extra.advice}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it; or a module without a spec is loaded
        return False
