"""Create folders atomically, under names with a digest of their inputs."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigError


def digest(*parts: object) -> str:
    """Return a digest of `parts`: the first ten hex digits of the SHA-256 of ``repr(parts)``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def publish(directory: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the path of the folder `directory/name`. If the folder does not exist, create it with `fill`.

    `fill` writes into a temporary folder, which is then renamed, so that no caller sees an incomplete folder.
    If several callers create the folder at the same time, the folder that is renamed first is kept, and the
    others are removed.

    Args:
        directory: parent folder; created if it does not exist.
        name: name of the folder.
        fill: function that writes the content into the given folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        return _published(directory, name, fill)
    except OSError as error:
        raise ConfigError(
            f"cannot keep {name} in {directory}: {error.strerror}; set XDG_CACHE_HOME to a directory with "
            "room that you may write"
        ) from error


def _published(directory: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the path of `directory/name`, and create it with `fill` if it does not exist.

    This is `publish` without the conversion of OSError to ConfigError.

    Args:
        directory: parent folder; created if it does not exist.
        name: name of the folder.
        fill: function that writes the content into the given folder.

    Raises:
        OSError: the folder cannot be written.
    """
    final = directory / name
    if final.is_dir():
        return final
    directory.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        fill(private)
        private.chmod(0o755)
        try:
            private.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return final
