"""The user's cache directory for kvferry; its content can be deleted at any time."""

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
