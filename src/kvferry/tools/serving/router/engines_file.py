"""The file that lists a router's engines, and the task that applies its changes.

The file has one engine per line: its role and its URL. Empty lines and lines that begin with ``#`` are
skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.tools.serving.router.backends import Pool
from kvferry.tools.serving.router.settings import engine_url

_log = logging.getLogger("kvferry.router")

_ROLES = ("prefill", "decode")
_EXAMPLE = "write one engine per line, such as: decode http://host:port"


def read_engines(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the base URLs in a file of engines by role, at least one per role, each once.

    Raises:
        ConfigError: the file cannot be read, a line is not a role and a URL, or a role has no engine.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read engines from {path}: {reason}; {_EXAMPLE}") from None
    found: dict[str, dict[str, None]] = {role: {} for role in _ROLES}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        url = engine_url(words[-1])
        if len(words) != 2 or words[0] not in _ROLES or url is None:
            raise ConfigError(f"line {number} of {path} is {line.strip()!r}; {_EXAMPLE}")
        found[words[0]][url] = None
    for role, urls in found.items():
        if not urls:
            raise ConfigError(f"{path} has no {role} engine; {_EXAMPLE}")
    return {role: tuple(urls) for role, urls in found.items()}


async def watch_engines(path: Path, pools: Mapping[str, Pool], seconds: float) -> None:
    """Give the pools the engines of a file whenever it changes, until this coroutine is cancelled.

    Args:
        pools: pools of the router by role, ``prefill`` and ``decode``.
        seconds: time between two looks at the file.
    """
    said = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            engines = await asyncio.to_thread(read_engines, path)
        # Someone may be writing the file: keep the engines, and say why once.
        except ConfigError as error:
            if str(error) != said:
                _log.warning("the router keeps its engines: %s", error)
            said = str(error)
        else:
            said = ""
            for role, pool in pools.items():
                pool.replace(engines[role])
