"""Digests of the weights in a checkpoint.

A model's name does not identify its weights, and files of different weights can have equal headers and sizes.
So all bytes are digested, at several GB/s, with BLAKE3 on all cores. A JSON file, the *digest file*, keeps
the digest of each weight file.

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

from kvferry.common.errors import ConfigError
from kvferry.common.files import user_cache

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_BUFFER_BYTES = 4 << 20
# Bytes read between two progress messages. Reading so many takes seconds.
_PROGRESS_BYTES = 8 << 30
# Granularity of file times on some file systems. A file changed more recently may change again unnoticed.
_SETTLED_SECONDS = 2.0
# Maximum number of digests in the digest file.
_MOST_FILES = 4096


def weights_of(model: Path) -> str | None:
    """Return the digest of the weights of a checkpoint, 32 hex digits; None if it has no weight files.

    The files, in the directory `model` or `model` itself, are digested in the order of their names. The
    names themselves are not part of the digest. ConfigError if one cannot be read, or changes meanwhile.
    """
    files = [model] if model.is_file() else sorted({f for each in _WEIGHTS for f in model.glob(each)})
    return digest_of_files(files) if files else None


def digest_of_files(
    files: Sequence[Path],
    digest_file: Path | None = None,
    now: Callable[[], float] = time.time,
    digest: Callable[[FileIO, Callable[[int], None]], str] | None = None,
    max_digests: int = _MOST_FILES,
) -> str:
    """Return the digest of the content of files, in the given order: 32 hex digits.

    `digest_file` is None for the user's own. `now` is in seconds since 1970, to compare with file times.
    Raise ConfigError if a file cannot be read, or changes while it is read.
    """
    digest_file = digest_file or _default_digest_file()
    known, news = _read_digest_file(digest_file), {}
    whole, progress = hashlib.blake2b(digest_size=16), log_progress(files)
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
    """Return the key under which a file's digest is cached. If the file changes, its key changes."""
    # A file that is copied over another of the same size can keep the modification time, but not the change
    # time.
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def cached_digests() -> tuple[Path | None, int]:
    """Return the path of this user's digest file, if it has a cache directory, and the number of digests."""
    digest_file = _default_digest_file()
    return digest_file, len(_read_digest_file(digest_file))


def log_progress(files: Sequence[Path]) -> Callable[[int], None]:
    """Return a function that takes a number of bytes read, and logs a line each `_PROGRESS_BYTES` of all."""
    read = 0

    def add(count: int) -> None:
        nonlocal read
        before, read = read, read + count
        if before // _PROGRESS_BYTES != read // _PROGRESS_BYTES:
            logger.info("hashing %d weight files, once: %.1f GB so far", len(files), read / 1e9)

    return add


def digest_file_content(file: FileIO, progress: Callable[[int], None]) -> str:
    """Return the BLAKE3 digest of an unbuffered binary file, in hex. `progress` gets each number of bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    # Not through a memory map: if somebody truncates a mapped file, the process gets SIGBUS.
    while count := file.readinto(buffer):
        hasher.update(buffer[:count])
        progress(count)
    return str(hasher.hexdigest())


def _default_digest_file() -> Path | None:
    try:
        return user_cache() / "weights.json"
    except ConfigError:
        return None


def _read_digest_file(digest_file: Path | None) -> dict[str, str]:
    """Return the digests in the digest file by file key; none if it is missing or damaged."""
    if digest_file is None:
        return {}
    try:
        read = json.loads(digest_file.read_text())
        files: dict[str, str] = read["files"]
        return files if read["check"] == _check(files) else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _check(files: dict[str, str]) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=8).hexdigest()


def _add_digests(digest_file: Path | None, news: dict[str, str], max_digests: int) -> None:
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
            # A rename, so that readers see the old file or the new one.
            Path(name).replace(digest_file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.debug("digests of weights are not remembered: %s", error)
