"""Digests of the weights in a checkpoint.

A model's name does not identify its weights, and files of different weights can have equal headers and sizes.
So all bytes are digested, at several GB/s, with BLAKE3 on all cores. A JSON file, the *digest file*, keeps
the digest of each weight file by device, inode, size, modification time and change time. A file that is
copied over another of the same size can keep the modification time, but not the change time.

The digest file is only a cache. If it is missing, damaged or not writable, the weights are read again.
Concurrent writers may lose each other's new digests, but do not damage the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.user_cache import user_cache

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_BUFFER_BYTES = 4 << 20
_PROGRESS_BYTES = 8 << 30
"""Number of bytes read between two progress messages. Reading so many takes seconds."""
_SETTLED_SECONDS = 2.0
"""Granularity of file times on some file systems. A file changed more recently may change again unnoticed."""
_MOST_FILES = 4096
"""Maximum number of digests in the digest file."""


def weights_of(model: Path) -> str | None:
    """Return the digest of the weights of a checkpoint, 32 hex digits; None if it has no weight files.

    The files are digested in the order of their names. The names themselves are not part of the digest.

    Args:
        model: directory of the checkpoint, or path of its only file.

    Raises:
        ConfigError: a file cannot be read, or changes while it is read.
    """
    files = [model] if model.is_file() else sorted({f for each in _WEIGHTS for f in model.glob(each)})
    return digest_of_files(files) if files else None


def digest_of_files(
    files: Sequence[Path],
    digest_file: Path | None = None,
    now: Callable[[], float] = time.time,
    digest: Callable[[FileIO, Progress], str] | None = None,
    max_digests: int = _MOST_FILES,
) -> str:
    """Return the digest of the content of files, in the given order: 32 hex digits.

    Args:
        files: paths of the files.
        digest_file: path of the JSON file that caches digests; None for the one in the user's cache
            directory.
        now: function that returns the current time in seconds since 1970, to compare with file times. The
            digest of a file that changed less than `_SETTLED_SECONDS` ago is not cached.
        digest: function that reads and digests one open file; None for `digest_file_content`.
        max_digests: maximum number of digests in the digest file.

    Raises:
        ConfigError: a file cannot be read, or changes while it is read.
    """
    digest_file = digest_file or _default_digest_file()
    known, news = _read_digest_file(digest_file), {}
    whole, progress = hashlib.blake2b(digest_size=16), Progress(files)
    for file in files:
        try:
            with file.open("rb", buffering=0) as opened:
                stat = os.fstat(opened.fileno())
                key = file_key(stat)
                if key not in known:
                    known[key] = (digest or digest_file_content)(opened, progress)
                    if file_key(os.fstat(opened.fileno())) != key:
                        raise ConfigError(
                            f"weights {file.name} changed while they were read; wait until they are complete"
                        )
                    if max(stat.st_mtime, stat.st_ctime) < now() - _SETTLED_SECONDS:
                        news[key] = known[key]
        except OSError as error:
            raise ConfigError(
                f"weights {file.name} cannot be read: {error.strerror}; let the engine's user read them"
            ) from error
        whole.update(bytes.fromhex(known[key]))
    if news:
        _add_digests(digest_file, news, max_digests)
    return whole.hexdigest()


def file_key(stat: os.stat_result) -> str:
    """Return the key under which a file's digest is cached: its device, inode, size and times.

    If the file changes, its key changes.
    """
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def cached_digests() -> tuple[Path | None, int]:
    """Return (path of this user's digest file, number of digests in the file).

    The digest file is a JSON file that caches digests of weights. The path is None if the user has no cache
    directory. The file need not exist.
    """
    digest_file = _default_digest_file()
    return digest_file, len(_read_digest_file(digest_file))


class Progress:
    """Logs a message each time `_PROGRESS_BYTES` more bytes of weight files have been read.

    Args:
        files: files to read; the messages contain their number.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._of = f"{len(files)} weight files"
        self._read = 0

    def add(self, count: int) -> None:
        """Add `count` bytes to the number of bytes read, and log a message when one is due."""
        before, self._read = self._read, self._read + count
        if before // _PROGRESS_BYTES != self._read // _PROGRESS_BYTES:
            logger.info("hashing %s, once: %.1f GB so far", self._of, self._read / 1e9)


def digest_file_content(file: FileIO, progress: Progress) -> str:
    """Return the BLAKE3 digest of an open file, in hex.

    The file is not read through a memory map, because truncation of a mapped file would kill the process
    (SIGBUS).

    Args:
        file: unbuffered binary file.
        progress: counter of the bytes read. Mutated.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while count := file.readinto(buffer):
        hasher.update(buffer[:count])
        progress.add(count)
    return str(hasher.hexdigest())


def _default_digest_file() -> Path | None:
    """Return the path of the digest file (JSON file that caches digests) in the user's cache directory.

    Return None if the user has no cache directory.
    """
    try:
        return user_cache() / "weights.json"
    except ConfigError:
        return None


def _read_digest_file(digest_file: Path | None) -> dict[str, str]:
    """Return the digests in the digest file (JSON file that caches digests of weights), by file key.

    The result is empty if the file is missing or damaged.

    Args:
        digest_file: path of the digest file; None for a user without a cache directory.
    """
    if digest_file is None:
        return {}
    try:
        read = json.loads(digest_file.read_text())
        files: dict[str, str] = read["files"]
        return files if read["check"] == _check(files) else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _check(files: dict[str, str]) -> str:
    """Return a checksum of cached digests, which is stored beside them in the digest file to detect damage.

    Args:
        files: digests by file key.
    """
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=8).hexdigest()


def _add_digests(digest_file: Path | None, news: dict[str, str], max_digests: int) -> None:
    """Add new digests to the digest file (JSON file that caches digests of weights).

    The file keeps only the newest `max_digests` digests. If it cannot be written, it stays as it is.

    Args:
        digest_file: path of the digest file; None for a user without a cache directory.
        news: new digests by file key.
    """
    if digest_file is None:
        return
    kept = {key: digest for key, digest in _read_digest_file(digest_file).items() if key not in news} | news
    files = dict(list(kept.items())[-max_digests:])
    try:
        digest_file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{digest_file.name}.", dir=digest_file.parent)
        try:
            with os.fdopen(handle, "w") as temporary:
                json.dump({"check": _check(files), "files": files}, temporary)
            Path(name).replace(digest_file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.debug("digests of weights are not remembered: %s", error)
