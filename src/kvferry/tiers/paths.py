"""File names in a directory of the file tier, and listings of its files. `docs/format.md` shows the layout.

The object tier has the same layout below its URL. A *name* is relative to the directory or the URL.

kvferry counts, moves and removes only files with a name made here.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from kvferry.user_cache import user_cache

DIRECTORY_VERSION = 1
MARKER = "kvferry.json"
LEDGER = "ledger"
QUARANTINE = "quarantine"
NAMESPACE_NOTE = "namespace.json"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(r"((?:[0-9a-f]{2}){16,32})\.kv")
_CHUNKS = re.compile(r"(?<![^/])([0-9a-f]{32,64})\.kv(?![^/])")
_TEMPORARY = re.compile(r"\.[0-9a-z]+\.(\d{1,19})\.([0-9a-f]+)\.[0-9a-f]{16}\.tmp")
_BAD = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32,64}-[0-9a-f]{16}\.bad")


class EntryKind(StrEnum):
    """The kind of a file in a cache."""

    CHUNK = "chunk"
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"
    NOTE = "note"
    LEDGER = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A file or object of a cache.

    Attributes:
        path: path of the file, or URL of the object.
        kind: kind of the file.
        size: bytes of the file.
        charged: bytes counted against the capacity: the size, or the bytes reserved for a temporary file.
        used_ns: time of the last use, nanoseconds since 1970.
        namespace: 64 hex digits; empty if the file belongs to no namespace.
        boot: boot id of the machine that writes a temporary file; empty for other files.
    """

    path: str
    kind: EntryKind
    size: int
    charged: int
    used_ns: int
    namespace: str = ""
    boot: str = ""


def chunk_path(root: str, namespace: bytes, key: bytes) -> str:
    """Return the path of a key's chunk, whether or not it exists."""
    return f"{root}/{chunk_name(namespace, key)}"


def chunk_name(namespace: bytes, key: bytes) -> str:
    """Return the name of a key's chunk, relative to the root."""
    return f"{namespace.hex()}/{key[:1].hex()}/{key.hex()}.kv"


def note_name(namespace: bytes) -> str:
    """Return the name of a namespace's note, relative to the root."""
    return f"{namespace.hex()}/{NAMESPACE_NOTE}"


def key_of(name: str) -> bytes | None:
    """Return the key in a file name; None if it is not the name of a chunk."""
    found = _CHUNK.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return the keys in file names, leaving out names that are not of chunks."""
    # No name has a slash in it. One search of many names takes a third of the time of one search each.
    found = _CHUNKS.findall("/".join(names))
    return [bytes.fromhex(key) for key in found if len(key) % 2 == 0]


def is_chunk_folder(name: str) -> bool:
    """Return whether a folder of that name holds chunks."""
    return _BUCKET.fullmatch(name) is not None


def temporary_path(final: str, reserved: int) -> str:
    """Return an unused path beside `final` whose name holds the bytes reserved for it."""
    folder, name = os.path.split(final)
    stem = name.partition(".")[0]
    return f"{folder}/.{stem}.{reserved}.{boot_id()}.{secrets.token_hex(8)}.tmp"


def chunk_identity(path: str) -> tuple[bytes, bytes]:
    """Return namespace and key of a path made by `chunk_path`."""
    folders, name = os.path.split(path)
    return bytes.fromhex(folders.split("/")[-2]), key_of(name) or b""


def quarantine_path(root: str, path: str) -> str:
    """Return a new path in quarantine for a bad file at a path made by `chunk_path`."""
    return f"{root}/{quarantine_name(*chunk_identity(path))}"


def quarantine_name(namespace: bytes, key: bytes) -> str:
    """Return a new name in quarantine for a bad chunk."""
    return f"{QUARANTINE}/{namespace.hex()}-{key.hex()}-{secrets.token_hex(8)}.bad"


def entry_kind(name: str) -> EntryKind | None:
    """Return the kind of a name; None if it is not kvferry's. `walk` finds further kinds, in directories.

    >>> entry_kind(chunk_name(bytes(32), bytes(16))), entry_kind("00/mine.kv")
    (<EntryKind.CHUNK: 'chunk'>, None)
    """
    match name.split("/"):
        case [namespace, bucket, file] if _NAMESPACE.fullmatch(namespace) and is_chunk_folder(bucket):
            return EntryKind.CHUNK if _CHUNK.fullmatch(file) else None
        case [namespace, file] if _NAMESPACE.fullmatch(namespace) and file == NAMESPACE_NOTE:
            return EntryKind.NOTE
        case [folder, file] if folder == QUARANTINE and _BAD.fullmatch(file):
            return EntryKind.QUARANTINED
    return None


def default_directory() -> str:
    """Return the default directory of the file tier, in the user's cache directory.

    Raises:
        ConfigError: the user has no cache directory.
    """
    return str(user_cache() / "chunks")


def find_same_directory(path: str, others: Iterable[str]) -> str | None:
    """Return which of `others` is the same directory as `path`, by link or mount; None if none is."""
    for other in others:
        with suppress(OSError):
            if os.path.samefile(path, other):
                return other
    return None


@cache
def boot_id() -> str:
    """Return an id of this boot of the machine, in hex."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return os.uname().nodename.encode().hex()


def walk(root: str) -> Iterator[CacheEntry]:
    """Yield all files of the tier under `root`, except those removed meanwhile.

    Raises:
        OSError: an existing folder cannot be read.
    """
    for name, is_folder, entry in _scan(root):
        if is_folder and _NAMESPACE.fullmatch(name):
            yield from _walk_namespace(entry.path, name)
        elif is_folder and name == QUARANTINE:
            yield from _files(entry.path, {_BAD: EntryKind.QUARANTINED}, links=True)
        elif not is_folder and name in (MARKER, LEDGER):
            yield from _stat(entry, EntryKind.NOTE if name == MARKER else EntryKind.LEDGER)
        elif not is_folder and (found := _TEMPORARY.fullmatch(name)):
            yield from _stat(entry, EntryKind.TEMPORARY, found=found)


def folders(root: str) -> Iterator[str]:
    """Yield all folders of the tier under `root`, inner ones first."""
    for name, is_folder, entry in _scan(root):
        if is_folder and _NAMESPACE.fullmatch(name):
            yield from (
                one.path for inner, nested, one in _scan(entry.path) if nested and is_chunk_folder(inner)
            )
        if is_folder and (name == QUARANTINE or _NAMESPACE.fullmatch(name)):
            yield entry.path


def _walk_namespace(folder: str, namespace: str) -> Iterator[CacheEntry]:
    for name, is_folder, entry in _scan(folder):
        if is_folder and is_chunk_folder(name):
            yield from _files(
                entry.path, {_CHUNK: EntryKind.CHUNK, _TEMPORARY: EntryKind.TEMPORARY}, namespace
            )
        elif not is_folder and name == NAMESPACE_NOTE:
            yield from _stat(entry, EntryKind.NOTE, namespace)
        elif not is_folder and (found := _TEMPORARY.fullmatch(name)):
            yield from _stat(entry, EntryKind.TEMPORARY, namespace, found)


def _files(
    folder: str, kinds: dict[re.Pattern[str], EntryKind], namespace: str = "", *, links: bool = False
) -> Iterator[CacheEntry]:
    for name, is_folder, entry in _scan(folder, links=links):
        for pattern, kind in kinds.items():
            if not is_folder and (found := pattern.fullmatch(name)):
                yield from _stat(entry, kind, namespace, found)


def _scan(folder: str, *, links: bool = False) -> Iterator[tuple[str, bool, os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if links or not entry.is_symlink():
                    yield entry.name, entry.is_dir(follow_symlinks=False), entry
    except FileNotFoundError:
        _check_gone(folder)


def _check_gone(path: str) -> None:
    """Check that a path is gone: a file on a mount that fails for a moment must not count as free space.

    Raises:
        OSError: the path still exists.
    """
    if os.path.lexists(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


def _stat(
    entry: os.DirEntry[str], kind: EntryKind, namespace: str = "", found: re.Match[str] | None = None
) -> Iterator[CacheEntry]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        _check_gone(entry.path)
        return
    if kind is EntryKind.TEMPORARY and found is not None:
        charged, boot = int(found[1]), found[2]
    else:
        charged, boot = status.st_size, ""
    yield CacheEntry(
        path=entry.path,
        kind=kind,
        size=status.st_size,
        charged=charged,
        used_ns=status.st_mtime_ns,
        namespace=namespace,
        boot=boot,
    )
