"""Create folders atomically, under names with a digest of their inputs."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigError


def digest(*parts: object) -> str:
    """Return the first ten hex digits of the SHA-256 of ``repr(parts)``."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def publish(directory: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the path of the folder `directory/name`. If the folder does not exist, create it with `fill`.

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
    """Do the work of `publish`, and raise an OSError as it is."""
    final = directory / name
    if final.is_dir():
        return final
    directory.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete. Of several callers, the first to rename wins.
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
