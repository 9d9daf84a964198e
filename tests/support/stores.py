"""File stores over real folders, for tests."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.keys import Namespace
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import body_of, key


def namespace_of(weights: str, name: str) -> Namespace:
    """Of a model with these weights."""
    return Namespace.of(
        weights=weights,
        model={"layers": 2},
        dtype="bfloat16",
        kv_dtype="auto",
        scales={},
        form=["chunks of 64 tokens", "group full"],
        name=name,
    )


NAMESPACE = namespace_of("0123abcd", "tests/small")
OTHER = namespace_of("4567cdef", "tests/other")
# Header 4 KiB, two sections of 28 KiB: a file of 60 KiB.
GROUP = ChunkGroup("full", 64, (ChunkSection("k", 4, 7 << 10), ChunkSection("v", 4, 7 << 10)))
FILE_BYTES = 60 << 10


class Clock:
    """Seconds since 1970, as a test says; well in the past, so that no kernel's time is earlier."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def open_store(path: Path, **options) -> FileTier:
    return FileTier(path, options.pop("namespace", NAMESPACE), **options)


def body(number: int, group: ChunkGroup = GROUP) -> memoryview:
    """What the chunk of a number holds."""
    return body_of(Chunk(NAMESPACE.digest, key(number), (group,)))


def keep(store: FileTier, number: int, group: ChunkGroup = GROUP) -> PutOutcome:
    """Store the chunk of a number."""
    return store.put(key(number), group, body(number, group))


def fetch(store: FileTier, number: int, group: ChunkGroup = GROUP) -> tuple[GetOutcome, bool]:
    """Fetch the chunk of a number: what became of it, and whether it is what was stored."""
    stored = body(number, group)
    into = whole_pages(len(stored))
    into[:] = bytes(len(into))  # or it may be the memory of an earlier fetch, with the same bytes
    done = store.get(key(number), group, into)
    pairs = zip(*(sections(group, memory) for memory in (stored, into)), strict=True)
    return done, all(one == other for one, other in pairs)


def sections(group: ChunkGroup, memory: memoryview) -> list[memoryview]:
    """The sections of a chunk in memory, without what pads them."""
    chunk = Chunk(bytes(32), bytes(16), (group,))
    starts = [offset - chunk.offsets[0] for offset in chunk.offsets]
    return [memory[at : at + one.total_bytes] for at, one in zip(starts, group.sections, strict=True)]


def file_of(root: Path, number: int) -> Path:
    """Where the chunk of a number lies."""
    name = key(number).hex()
    return root / NAMESPACE.digest.hex() / name[:2] / f"{name}.kv"


def total(root: Path) -> int:
    """Bytes of all files under a folder, as long as nobody changes it."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def die_while_writing(root: Path, number: int, group: ChunkGroup = GROUP, size: int = 0) -> None:
    """Leave the file of a process that dies after it has written `size` bytes of a chunk."""
    if not (child := os.fork()):
        try:
            store = open_store(root, write=lambda fd, *_: (os.write(fd, bytes(size)), os._exit(0)))
            keep(store, number, group)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".*.tmp"))
