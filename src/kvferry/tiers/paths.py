"""File names in a directory of the file tier, and listings of its files. `docs/format.md` shows the layout.

The object tier uses the same layout below its URL. A *path* includes the directory or the URL, a *name* is
relative to it. The *root* is the directory.

kvferry counts, moves and removes only files whose names match the patterns of this module.
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
"""Version of the layout of a directory."""
MARKER = "kvferry.json"
"""Name of the file that marks a directory of the file tier and contains the version of its layout."""
LEDGER = "ledger"
"""Name of the file with the capacity and the bytes in use."""
QUARANTINE = "quarantine"
"""Name of the folder for bad chunks."""
NAMESPACE_NOTE = "namespace.json"
"""Name of the file in a namespace's folder that describes the namespace."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(r"((?:[0-9a-f]{2}){16,32})\.kv")
_CHUNKS = re.compile(r"(?<![^/])([0-9a-f]{32,64})\.kv(?![^/])")
_TEMPORARY = re.compile(r"\.[0-9a-z]+\.(\d{1,19})\.([0-9a-f]+)\.[0-9a-f]{16}\.tmp")
_BAD = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32,64}-[0-9a-f]{16}\.bad")


class EntryKind(StrEnum):
    """The purpose of a file in a cache directory, or of an object in a bucket."""

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
        kind: purpose of the file.
        size: length of the file in bytes.
        charged: bytes that count against the capacity. They differ from `size` only for a temporary file, for
            which the reserved bytes count.
        used_ns: time in nanoseconds since 1970 at which the file was last used, or the object was stored.
        namespace: digest of the namespace (scope of chunk keys), 64 hex digits; empty if the file belongs to
            none.
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
    """Return the path of the chunk file for a key. The file need not exist.

    Args:
        root: path of the file tier's directory.
        namespace: digest of the namespace (scope of chunk keys), 32 bytes.
        key: key of the chunk, 16 to 32 bytes.
    """
    return f"{root}/{chunk_name(namespace, key)}"


def chunk_name(namespace: bytes, key: bytes) -> str:
    """Return the name of the chunk file for a key, relative to the directory or the URL of the tier.

    Args:
        namespace: digest of the namespace (scope of chunk keys), 32 bytes.
        key: key of the chunk, 16 to 32 bytes.
    """
    return f"{namespace.hex()}/{key[:1].hex()}/{key.hex()}.kv"


def note_name(namespace: bytes) -> str:
    """Return the name of a namespace's note (descriptive file), relative to the tier's directory or URL.

    Args:
        namespace: digest of the namespace (scope of chunk keys), 32 bytes.
    """
    return f"{namespace.hex()}/{NAMESPACE_NOTE}"


def key_of(name: str) -> bytes | None:
    """Return the chunk key in a file name without folders; None if the name is not that of a chunk file."""
    found = _CHUNK.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return the chunk keys in file names without folders. Names of other files are skipped."""
    # A file name has no slash. One search over all names takes a third of the time of one search per name.
    found = _CHUNKS.findall("/".join(names))
    return [bytes.fromhex(key) for key in found if len(key) % 2 == 0]


def is_chunk_folder(name: str) -> bool:
    """Return whether `name` can be the name of a chunk folder (a subfolder of a namespace's folder)."""
    return _BUCKET.fullmatch(name) is not None


def temporary_path(final: str, reserved: int) -> str:
    """Return an unused path for a temporary file in the folder of `final`.

    Args:
        final: path to which the file will be renamed when it is complete.
        reserved: number of bytes reserved for the file. The number becomes part of the temporary name.
    """
    folder, name = os.path.split(final)
    stem = name.partition(".")[0]
    return f"{folder}/.{stem}.{reserved}.{boot_id()}.{secrets.token_hex(8)}.tmp"


def chunk_identity(path: str) -> tuple[bytes, bytes]:
    """Parse the path of a chunk file, and return the digest of its namespace and the key of its chunk.

    The namespace is the scope of chunk keys. The key is empty if the file name is not that of a chunk file.
    """
    folders, name = os.path.split(path)
    return bytes.fromhex(folders.split("/")[-2]), key_of(name) or b""


def quarantine_path(root: str, path: str) -> str:
    """Return an unused path in the quarantine folder, to which a bad chunk file can be moved.

    Args:
        root: path of the file tier's directory.
        path: current path of the chunk file.
    """
    return f"{root}/{quarantine_name(*chunk_identity(path))}"


def quarantine_name(namespace: bytes, key: bytes) -> str:
    """Return an unused name for a bad chunk in quarantine, relative to the directory or the URL of the tier.

    Args:
        namespace: digest of the namespace (scope of chunk keys), 32 bytes.
        key: key of the chunk, 16 to 32 bytes.
    """
    return f"{QUARANTINE}/{namespace.hex()}-{key.hex()}-{secrets.token_hex(8)}.bad"


def entry_kind(name: str) -> EntryKind | None:
    """Return the purpose of an object in object storage, derived from its name.

    Return None if the name is not that of a kvferry object. Only kinds that occur in object storage are
    recognised; `walk` recognises more kinds in a directory.

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
    """Return the first of `others` that is the same directory as `path`; None if there is none.

    Paths that differ can be the same directory, through links or mounts. Missing directories are skipped.
    """
    for other in others:
        with suppress(OSError):
            if os.path.samefile(path, other):
                return other
    return None


@cache
def boot_id() -> str:
    """Return the kernel's id of the current boot, in hex; the host name in hex if there is no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return os.uname().nodename.encode().hex()


def walk(root: str) -> Iterator[CacheEntry]:
    """Yield an entry for each kvferry file under the directory `root`.

    Files removed during the walk are skipped.

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
    """Yield the paths of all kvferry folders under `root`.

    Each folder comes after the folders that it contains.
    """
    for name, is_folder, entry in _scan(root):
        if is_folder and _NAMESPACE.fullmatch(name):
            yield from (
                one.path for inner, nested, one in _scan(entry.path) if nested and is_chunk_folder(inner)
            )
        if is_folder and (name == QUARANTINE or _NAMESPACE.fullmatch(name)):
            yield entry.path


def _walk_namespace(folder: str, namespace: str) -> Iterator[CacheEntry]:
    """Yield an entry for each kvferry file in the folder of one namespace (scope of chunk keys).

    Args:
        folder: path of the folder.
        namespace: digest of the namespace, 64 hex digits.
    """
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
    """Yield an entry for each file of a folder whose name matches a pattern in `kinds`.

    Args:
        folder: path of the folder.
        kinds: kind of file for each pattern of file names.
        namespace: digest of the namespace that the files belong to, 64 hex digits; empty if there is none.
        links: whether symbolic links are included.
    """
    for name, is_folder, entry in _scan(folder, links=links):
        for pattern, kind in kinds.items():
            if not is_folder and (found := pattern.fullmatch(name)):
                yield from _stat(entry, kind, namespace, found)


def _scan(folder: str, *, links: bool = False) -> Iterator[tuple[str, bool, os.DirEntry[str]]]:
    """Scan a folder, and yield (name, whether the entry is a folder, directory entry) for each entry.

    Symbolic links are skipped unless `links` is true. A missing folder has no entries.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if links or not entry.is_symlink():
                    yield entry.name, entry.is_dir(follow_symlinks=False), entry
    except FileNotFoundError:
        _check_gone(folder)


def _check_gone(path: str) -> None:
    """Check that a path really does not exist, after a call has raised FileNotFoundError for it.

    If a mount fails for a moment, its files must not be treated as removed, because they still use space.

    Raises:
        OSError: the path exists.
    """
    if os.path.lexists(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


def _stat(
    entry: os.DirEntry[str], kind: EntryKind, namespace: str = "", found: re.Match[str] | None = None
) -> Iterator[CacheEntry]:
    """Yield a `CacheEntry` for a file; yield nothing if the file is gone.

    Args:
        entry: directory entry of the file.
        kind: purpose of the file.
        namespace: digest of the namespace, 64 hex digits; empty if the file belongs to none.
        found: regular-expression match of a temporary file's name, which contains the reserved bytes and the
            boot id; unused for other kinds of files.
    """
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
