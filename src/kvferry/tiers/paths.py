"""File names in a directory of the file tier, and listings of its files. `docs/format.md` shows the layout.

The object tier uses the same layout below its URL. A *path* includes the directory or the URL, a *name* is
relative to it. kvferry counts, moves and removes only files whose names match the patterns of this module.
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
from typing import TypeAlias

from kvferry.common.files import user_cache
from kvferry.keys.tenant import TENANT_BYTES, tenant_of_key

# Version of the layout of a directory, which the marker contains.
DIRECTORY_VERSION = 1
# Version of the layout of a directory whose chunks are encrypted.
ENCRYPTED_DIRECTORY_VERSION = 2
MARKER = "kvferry.json"
LEDGER = "ledger"
QUARANTINE = "quarantine"
NAMESPACE_NOTE = "namespace.json"
# In object storage: the chunks are encrypted.
ENCRYPTION_MARKER = "encryption.json"

# A folder for chunks, inside a namespace's folder.
BUCKET = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(r"((?:[0-9a-f]{2}){16,32})\.kv")
_CHUNKS = re.compile(r"(?<![^/])([0-9a-f]{32,64})\.kv(?![^/])")
_TEMPORARY = re.compile(r"\.[0-9a-z]+\.(\d{1,19})\.([0-9a-f]+)\.[0-9a-f]{16}\.tmp")
# A name that contains the key of a chunk.
_KEYED = re.compile(r"\.?(?:[0-9a-f]{64}-)?((?:[0-9a-f]{2}){16,32})[.-]")


class EntryKind(StrEnum):
    """The purpose of a file in a cache directory, or of an object in a bucket."""

    CHUNK = "chunk"
    TEMPORARY = "temporary"
    QUARANTINED = "quarantined"
    NOTE = "note"
    LEDGER = "ledger"


# The layout of a folder: for each pattern of names the kind of these files, or the layout of these folders.
_Layout: TypeAlias = "dict[re.Pattern[str], EntryKind | _Layout]"
_IN_BUCKET: _Layout = {_CHUNK: EntryKind.CHUNK, _TEMPORARY: EntryKind.TEMPORARY}
_IN_NAMESPACE: _Layout = {
    re.compile(re.escape(NAMESPACE_NOTE)): EntryKind.NOTE,
    _TEMPORARY: EntryKind.TEMPORARY,
    BUCKET: _IN_BUCKET,
}
_IN_QUARANTINE: _Layout = {
    re.compile(r"[0-9a-f]{64}-[0-9a-f]{32,64}-[0-9a-f]{16}\.bad"): EntryKind.QUARANTINED
}
_LAYOUT: _Layout = {
    re.compile(re.escape(MARKER)): EntryKind.NOTE,
    re.compile(LEDGER): EntryKind.LEDGER,
    _TEMPORARY: EntryKind.TEMPORARY,
    re.compile(QUARANTINE): _IN_QUARANTINE,
    re.compile(r"[0-9a-f]{64}"): _IN_NAMESPACE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A file or object of a cache."""

    path: str  # path of the file, or URL of the object
    kind: EntryKind
    size: int  # length of the file in bytes
    # Bytes that count against the capacity: of a temporary file those reserved, of others `size`.
    charged: int
    used_ns: int  # nanoseconds since 1970 at which the file was last used, or the object was stored
    namespace: str = ""  # digest of the namespace, 64 hex digits; empty if the file belongs to none
    boot: str = ""  # boot id of the machine that writes a temporary file; empty for other files


def chunk_name(namespace: bytes, key: bytes) -> str:
    """Return the name of the file of a chunk."""
    return f"{namespace.hex()}/{key[:1].hex()}/{key.hex()}.kv"


def note_name(namespace: bytes) -> str:
    """Return the name of the note of a namespace."""
    return f"{namespace.hex()}/{NAMESPACE_NOTE}"


def key_of(name: str) -> bytes | None:
    """Return the key in a file name without folders; None if it is no name of a chunk."""
    found = _CHUNK.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def keys_of(names: Sequence[str]) -> list[bytes]:
    """Return the keys in file names without folders. Names of other files are skipped."""
    # A file name has no slash. One search over all names takes a third of the time of one search per name.
    found = _CHUNKS.findall("/".join(names))
    return [bytes.fromhex(key) for key in found if len(key) % 2 == 0]


def temporary_path(final: str, reserved: int) -> str:
    """Return an unused path for a temporary file, with its reserved bytes in the name, beside `final`."""
    folder, name = os.path.split(final)
    # Size and boot id are in the name, so that a sweep knows them even of a file that has no content yet.
    stem = name.partition(".")[0]
    return f"{folder}/.{stem}.{reserved}.{boot_id()}.{secrets.token_hex(8)}.tmp"


def chunk_identity(path: str) -> tuple[bytes, bytes]:
    """Return the namespace's digest and the key in the path of a chunk; an empty key for another name."""
    folders, name = os.path.split(path)
    return bytes.fromhex(folders.split("/")[-2]), key_of(name) or b""


def tenant_of_path(path: str) -> bytes | None:
    """Return the tenant of the chunk in a file, maybe temporary or bad, by its name; None for other files.

    >>> tenant_of_path("/kv/00/" + "00" * 16 + "5f0c2a9b11de" + "00" * 10 + ".kv").hex()
    '5f0c2a9b11de'
    """
    found = _KEYED.match(path.rpartition("/")[2])
    # A key may be shorter.
    return tenant_of_key(bytes.fromhex(found[1])).ljust(TENANT_BYTES, b"\0") if found else None


def quarantine_name(namespace: bytes, key: bytes) -> str:
    """Return an unused name for a bad chunk in quarantine."""
    return f"{QUARANTINE}/{namespace.hex()}-{key.hex()}-{secrets.token_hex(8)}.bad"


def entry_kind(name: str) -> EntryKind | None:
    """Return the purpose of an object in object storage by its name; None if it is not kvferry's.

    >>> entry_kind(chunk_name(bytes(32), bytes(16))), entry_kind("00/mine.kv")
    (<EntryKind.CHUNK: 'chunk'>, None)
    """
    if name == ENCRYPTION_MARKER:
        return EntryKind.NOTE
    found: EntryKind | _Layout | None = _LAYOUT
    for part in name.split("/"):
        found = None if found is None or isinstance(found, EntryKind) else _find(found, part)
    # Object storage has no other files, and no others beside the folders.
    kinds = (EntryKind.CHUNK, EntryKind.NOTE, EntryKind.QUARANTINED)
    return found if "/" in name and found in kinds else None


def _find(layout: _Layout, name: str) -> EntryKind | _Layout | None:
    return next((found for pattern, found in layout.items() if pattern.fullmatch(name)), None)


def default_directory() -> str:
    """Return the file tier's directory in the user's cache directory; ConfigError without the latter."""
    return str(user_cache() / "chunks")


def find_same_directory(path: str, others: Iterable[str]) -> str | None:
    """Return the first of `others` that is `path`, maybe through links or mounts; None if there is none."""
    for other in others:
        with suppress(OSError):
            if os.path.samefile(path, other):
                return other
    return None


@cache
def boot_id() -> str:
    """Return the kernel's id of the current boot, or else the host name, in hex."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return os.uname().nodename.encode().hex()


def walk(root: str) -> Iterator[CacheEntry]:
    """Yield an entry for each kvferry file under `root`. Skip files that are removed meanwhile.

    Raise OSError if an existing folder cannot be read.
    """
    return _walk(root, _LAYOUT, "")


def folders(root: str) -> Iterator[str]:
    """Yield the paths of all kvferry folders under `root`, each after the folders that it contains."""
    return _folders(root, _LAYOUT)


def _walk(folder: str, layout: _Layout, namespace: str) -> Iterator[CacheEntry]:
    for entry, found in _scan(folder, layout):
        if not isinstance(found, EntryKind):
            yield from _walk(entry.path, found, entry.name if found is _IN_NAMESPACE else namespace)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            _check_gone(entry.path)
            continue
        temporary = _TEMPORARY.fullmatch(entry.name)
        charged, boot = (int(temporary[1]), temporary[2]) if temporary else (status.st_size, "")
        yield CacheEntry(
            path=entry.path,
            kind=found,
            size=status.st_size,
            charged=charged,
            used_ns=status.st_mtime_ns,
            namespace=namespace,
            boot=boot,
        )


def _folders(folder: str, layout: _Layout) -> Iterator[str]:
    for entry, found in _scan(folder, layout):
        if not isinstance(found, EntryKind):
            yield from _folders(entry.path, found)
            yield entry.path


def _scan(folder: str, layout: _Layout) -> Iterator[tuple[os.DirEntry[str], EntryKind | _Layout]]:
    """Yield the files and folders of a layout, and what they are, in a folder that may be missing."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                found = _find(layout, entry.name)
                # A planted link is moved to quarantine, too, and is evicted from there.
                if found is None or (entry.is_symlink() and found is not EntryKind.QUARANTINED):
                    continue
                if entry.is_dir(follow_symlinks=False) is not isinstance(found, EntryKind):
                    yield entry, found
    except FileNotFoundError:
        _check_gone(folder)


def _check_gone(path: str) -> None:
    """Raise OSError if a path exists, after a call has raised FileNotFoundError for it."""
    # If a mount fails for a moment, its files must not be treated as removed, because they still use space.
    if os.path.lexists(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
