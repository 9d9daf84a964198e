"""The user's home, and the cache directory for kvferry in it, whose content can be deleted at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache directory: ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``.

    Raises:
        ConfigError: neither variable is set, and the system knows no home of this user, as of a number that a
            container runs as.
    """
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    except RuntimeError as error:
        raise ConfigError(
            f"user {os.geteuid()} has no home; set XDG_CACHE_HOME to a directory that it may write"
        ) from error


def expanded(path: str) -> Path:
    """Return a path with the home for its ``~``, or as it is where the system knows no such home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises
