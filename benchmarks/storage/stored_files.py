"""What the benchmark does to the files of connectors: flush, drop from the page cache, swap, remove."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.tiers.files.chunk_file import set_direct


def flush(folder: Path) -> float:
    """Write all files in a folder to the disk, and return the seconds that this took."""
    began = time.perf_counter()
    for fd in _files(folder):
        os.fsync(fd)
    return time.perf_counter() - began


def drop_from_page_cache(folder: Path) -> None:
    """Drop all files in a folder from the page cache. They must have been flushed."""
    for fd in _files(folder):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def remove_all(folder: Path) -> None:
    """Remove everything in a folder."""
    for one in folder.iterdir():
        shutil.rmtree(one)


def overwrite(folder: Path, other: Path) -> None:
    """Replace the files of a stored prompt by those of another one."""
    shutil.copytree(other, folder, dirs_exist_ok=True)


def has_direct_io(folder: Path) -> bool:
    """Return whether the file system of a folder can read without the page cache."""
    with _probe(folder) as fd:
        return set_direct(fd, on=True)


@contextmanager
def _probe(folder: Path) -> Iterator[int]:
    path = folder / "direct-io"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def _files(folder: Path) -> Iterator[int]:
    """Yield a descriptor of each file in a folder and its subfolders."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)
