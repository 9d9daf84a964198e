"""Optional packages that commands need, by the extra of `pip install` that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of kvferry, as in ``pip install 'kvferry[vllm]'``.

    Attributes:
        name: name of the extra.
        modules: names of its packages for users, by the names to import.
    """

    name: str
    modules: Mapping[str, str]


ROUTER = Extra(
    "router", {"starlette": "Starlette", "uvicorn": "Uvicorn", "aiohttp": "aiohttp", "httptools": "httptools"}
)
VLLM = Extra("vllm", {"vllm": "vLLM", "nixl": "NIXL", **ROUTER.modules})
BENCH = Extra("bench", {"torch": "torch", "nixl": "NIXL"})


def require(command: str, extra: Extra) -> None:
    """Check that the packages of an extra are installed. Nothing is imported.

    Args:
        command: full name of the command that needs the packages.
        extra: the extra that has them.

    Raises:
        ConfigError: a package is missing.
    """
    for module, name in extra.modules.items():
        if not _is_installed(module):
            raise ConfigError(
                f"{command} needs {name}, which is not installed; "
                f"install it with pip install 'kvferry[{extra.name}]'"
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it; or a module without a spec is loaded
        return False
