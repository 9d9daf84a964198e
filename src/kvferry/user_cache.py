"""Find the user's home directory and kvferry's cache directory. Users may delete the cache at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return kvferry's cache directory: ``$XDG_CACHE_HOME/kvferry``, or else ``~/.cache/kvferry``.

    Raises:
        ConfigError: ``XDG_CACHE_HOME`` is not set, and the user has no home directory.
    """
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    except RuntimeError as error:
        # Containers may run as a user id without a name.
        raise ConfigError(
            "this user has no home directory; set XDG_CACHE_HOME to a directory that it may write"
        ) from error


def expanded(path: str) -> Path:
    """Replace a leading ``~`` of a path with the user's home directory, if there is one."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises
