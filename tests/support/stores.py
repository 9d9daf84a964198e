"""File stores over real folders, for tests."""

from __future__ import annotations

from pathlib import Path

from kvferry.keys import Namespace
from kvferry.tiers.file_store import FileStore, Part, Wanted
from kvferry.tiers.format import Chunk, Group, Section
from kvferry.tiers.outcome import Get
from support.chunk_files import content, key


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
GROUP = Group("full", 64, (Section("k", 4, 7 << 10), Section("v", 4, 7 << 10)))
FILE_BYTES = 60 << 10


class Clock:
    """Seconds since 1970, as a test says; well in the past, so that no kernel's time is earlier."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def open_store(path: Path, **options) -> FileStore:
    return FileStore(path, options.pop("namespace", NAMESPACE), **options)


def parts(number: int, group: Group = GROUP) -> list[Part]:
    """What the chunk of a number holds."""
    return [Part(group, tuple(content(Chunk(NAMESPACE.digest, key(number), (group,)))))]


def fetch(store: FileStore, number: int, first: int = 0, units: int = 4) -> tuple[Get, bool]:
    """Fetch units of both sections: what became of it, and whether they are what was stored."""
    wanted = [
        Wanted(GROUP, one.name, first, units, bytearray(units * one.unit_bytes)) for one in GROUP.sections
    ]
    done = store.get(key(number), wanted)
    right = [
        data[first * one.unit_bytes : (first + units) * one.unit_bytes]
        for data, one in zip(parts(number)[0].data, GROUP.sections, strict=True)
    ]
    return done, [bytes(one.into) for one in wanted] == right


def file_of(root: Path, number: int) -> Path:
    """Where the chunk of a number lies."""
    name = key(number).hex()
    return root / NAMESPACE.digest.hex() / name[:2] / f"{name}.kv"


def total(root: Path) -> int:
    """Bytes of all files under a folder, as long as nobody changes it."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".*.tmp"))
