"""What lies in a directory of the file tier, for an operator to see. Nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import ChunkError, ConfigError, Unnameable
from kvferry.keys.namespace import Namespace
from kvferry.tiers.aside import set_aside
from kvferry.tiers.chunk_io import read_header, verify_file
from kvferry.tiers.ledger import Ledger, read_ledger
from kvferry.tiers.opening import check_directory, read_marker
from kvferry.tiers.place import MARKER, NAMESPACE_NOTE, Entry, Kind, identity, walk

_LONGEST_NOTE = 1 << 20


@dataclass(frozen=True)
class Holding:
    """The chunks of one namespace.

    Attributes:
        namespace: 64 hex digits.
        name: the model's, as whoever came first calls it; empty where there is no note to believe.
        facts: what the namespace was made from; none where there is no note to believe.
        chunks: files.
        tokens: of all chunks; of the group that has most, where one has several.
        total_bytes: of the files.
        oldest, newest: when a chunk was last used, seconds since 1970; None where there is no chunk.
        unreadable: chunks among them whose header cannot be believed.
    """

    namespace: str
    name: str
    facts: dict[str, object]
    chunks: int
    tokens: int
    total_bytes: int
    oldest: float | None
    newest: float | None
    unreadable: int


@dataclass(frozen=True)
class Totals:
    """What a directory holds, in files and bytes.

    Attributes:
        capacity: bytes; None where the ledger cannot be read.
        charged: bytes that the ledger has as used: with those reserved for chunks being written.
        total_bytes: of all files.
        free: bytes free on the disk.
    """

    path: str
    capacity: int | None
    charged: int | None
    total_bytes: int
    free: int
    namespaces: int
    chunks: int
    chunk_bytes: int
    temporary: int
    temporary_bytes: int
    quarantined: int
    quarantined_bytes: int


@dataclass(frozen=True)
class Bad:
    """A file that failed a check.

    Attributes:
        path: its name.
        why: one sentence.
        moved: whether it was moved to quarantine.
    """

    path: str
    why: str
    moved: bool


@dataclass(frozen=True)
class Verdict:
    """What reading everything has shown."""

    chunks: int
    total_bytes: int
    bad: tuple[Bad, ...]


def a_cache(path: str | os.PathLike[str]) -> str:
    """The absolute path of a directory of the file tier.

    Raises:
        ConfigError: it is none.
    """
    root = os.path.abspath(path)
    check_directory(root)
    if read_marker(root) is None:
        raise ConfigError(
            f"{root} is no cache of kvferry: it has no {MARKER}; name the directory that has it"
        )
    return root


def holdings(root: str) -> list[Holding]:
    """What there is of each namespace; reads the header of every chunk."""
    found: dict[str, list[Entry]] = {}
    for entry in walk(root):
        if entry.namespace:
            found.setdefault(entry.namespace, []).append(entry)
    return [_holding(root, namespace, entries) for namespace, entries in sorted(found.items())]


def totals(root: str) -> Totals:
    """What the directory holds in all; reads no file."""
    entries = list(walk(root))
    ledger = read_ledger(root)
    space = os.statvfs(root)
    kinds = {kind: [_bytes(entry) for entry in entries if entry.kind is kind] for kind in Kind}
    return Totals(
        path=root,
        capacity=ledger and ledger[0],
        charged=ledger and ledger[1],
        total_bytes=sum(sum(sizes) for sizes in kinds.values()),
        free=space.f_bavail * space.f_frsize,
        namespaces=len({entry.namespace for entry in entries if entry.namespace}),
        chunks=len(kinds[Kind.CHUNK]),
        chunk_bytes=sum(kinds[Kind.CHUNK]),
        temporary=len(kinds[Kind.TEMPORARY]),
        temporary_bytes=sum(kinds[Kind.TEMPORARY]),
        quarantined=len(kinds[Kind.QUARANTINED]),
        quarantined_bytes=sum(kinds[Kind.QUARANTINED]),
    )


def verify_all(root: str, *, quarantine: bool = False) -> Verdict:
    """Read and check every byte of every chunk.

    Args:
        root: the directory.
        quarantine: move what is bad to quarantine; else nothing is changed.
    """
    bad, chunks, total_bytes = [], 0, 0
    for entry in walk(root):
        if entry.kind is Kind.CHUNK:
            why, moved = _check(root, entry.path, quarantine)
            chunks, total_bytes = chunks + 1, total_bytes + entry.charged
            if why:
                bad.append(Bad(entry.path, why, moved))
    return Verdict(chunks, total_bytes, tuple(bad))


def _check(root: str, path: str, quarantine: bool) -> tuple[str, bool]:
    """Why a file is bad, and whether it was moved; empty if it is good, or gone."""
    try:
        with _opened(path) as fd:
            try:
                header = verify_file(fd)
                if (header.chunk.namespace, header.chunk.key) != identity(path):
                    raise ChunkError(f"the chunk of key {header.chunk.key.hex()}, under another name")
            except ChunkError as error:
                return str(error), quarantine and set_aside(root, Ledger(root), fd, path)
    except FileNotFoundError:
        return "", False
    except OSError as error:
        return os.strerror(error.errno or 0), False
    return "", False


def _holding(root: str, namespace: str, entries: list[Entry]) -> Holding:
    chunks = [entry for entry in entries if entry.kind is Kind.CHUNK]
    tokens = [_tokens(entry.path) for entry in chunks]
    used = [entry.used_ns / 1e9 for entry in chunks]
    note = _note(root, namespace)
    return Holding(
        namespace=namespace,
        name=note.name if note else "",
        facts=note.facts if note else {},
        chunks=len(chunks),
        tokens=sum(each or 0 for each in tokens),
        total_bytes=sum(entry.charged for entry in chunks),
        oldest=min(used, default=None),
        newest=max(used, default=None),
        unreadable=tokens.count(None),
    )


def _tokens(path: str) -> int | None:
    """Tokens that a chunk holds; None where its header cannot be believed."""
    try:
        with _opened(path) as fd:
            return max(group.tokens for group in read_header(fd).chunk.groups)
    except FileNotFoundError:
        return 0
    except (ChunkError, OSError):
        return None


def _note(root: str, namespace: str) -> Namespace | None:
    """What the note of a namespace says; None where it cannot be read or is another's."""
    try:
        with open(f"{root}/{namespace}/{NAMESPACE_NOTE}", encoding="ascii") as file:
            found = Namespace.read(file.read(_LONGEST_NOTE))
    except (OSError, ValueError, Unnameable):
        return None
    return found if found.digest.hex() == namespace else None


def _bytes(entry: Entry) -> int:
    """Bytes that a file has now, where it is still there."""
    if entry.kind is not Kind.TEMPORARY:
        return entry.charged
    try:
        return os.stat(entry.path).st_size
    except OSError:
        return 0


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
