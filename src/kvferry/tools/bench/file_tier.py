"""Cases of the file tier: store and load durable chunks, compared with raw files of the same size.

The limit is the speed of raw files. They are written and read by threads of this process, and by fio if it is
installed; the faster of the two counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.common.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers import FileSettings, FileTier, read_all, whole_pages, write_all
from kvferry.tools.bench.movers import CallMover, pool_mover
from kvferry.tools.bench.rounds import TierCase
from kvferry.tools.bench.storage_chunks import (
    RandomChunks,
    StorageCases,
    bench_namespace,
    chunks_per_move,
    random_pages,
)

STORE_TARGET, LOAD_TARGET = 0.85, 0.9
_PIECE_BYTES = 1 << 20
_PIECES = 8
_PATIENCE_SECONDS = 300.0
_THREADS, _CACHED_THREADS = "threads, O_DIRECT", "threads, page cache"


def tier_cases(stack: ExitStack, group: CanonicalGroup, path: Path, depths: Sequence[int]) -> list[TierCase]:
    """Return the cases of each depth: storing, loading cold files, and loading files in the page cache.

    `stack` ends threads and removes files.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
    made = StorageCases(stack, group, depths, FileSettings.kind)
    usual = partial(_empty_tier, folder, None)
    cold, cached = made.filled_queue(partial(_empty_tier, folder, 0)), made.filled_queue(usual)
    # Raw files have the size of chunk files, with header and padding.
    size = made.chunks.file_bytes
    files = _write_files(folder, len(made.chunks), size)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-files"))
        number = chunks_per_move(depth)
        writes, reads = [_thread_writes(folder, pool, number, size)], [_thread_reads(pool, files[:number])]
        cached_reads = _thread_reads(pool, files[:number], direct=False)
        if has_fio():
            writes.append(_fio_writes(folder, depth, number, size))
            reads.append(_fio_reads(depth, files[:number]))
        found += [
            made.store(depth, usual, STORE_TARGET, writes),
            made.load(depth, cold, LOAD_TARGET, reads),
            made.load(depth, cached, LOAD_TARGET, [cached_reads], direction="load, cached"),
        ]
    return found


@contextmanager
def _empty_tier(folder: Path, page_cache: int | None, chunks: RandomChunks) -> Iterator[FileTier]:
    with TemporaryDirectory(dir=folder) as root:
        # Nothing is evicted, so no store waits for that.
        capacity = 2 * len(chunks) * chunks.chunk_bytes
        # Durable, because the raw files are too: both wait for the disk.
        namespace = bench_namespace(chunks.group)
        yield FileTier(root, namespace, capacity=capacity, durable=True, page_cache=page_cache)


def _write_files(folder: Path, count: int, size: int) -> list[Path]:
    raw = folder / "raw"
    raw.mkdir()
    content = random_pages(size)
    files = [raw / str(number) for number in range(count)]
    for file in files:
        _write_file(str(file), content)
    return files


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def _fio_writes(folder: Path, depth: int, files: int, size: int) -> CallMover:
    """Return a mover that writes new files with fio, in a new subfolder that it removes.

    Args:
        depth: number of fio jobs. Each writes one file at a time, and flushes it to the disk at its end.
    """

    def move() -> float:
        with TemporaryDirectory(dir=folder) as made:
            names = [str(number) for number in range(files)]
            return _run_fio(Path(made), "write", names, size, depth)

    return CallMover("fio", files * size, move)


def _fio_reads(depth: int, files: Sequence[Path]) -> CallMover:
    """Return a mover that reads files of one size and folder with fio jobs, each one file at a time."""
    size, names = files[0].stat().st_size, [file.name for file in files]
    return CallMover("fio", len(files) * size, partial(_run_fio, files[0].parent, "read", names, size, depth))


def _run_fio(folder: Path, direction: str, names: Sequence[str], size: int, depth: int) -> float:
    """Write or read files with fio, and return the time in seconds. Raises TransferError if fio failed."""
    # A mistake in the names must not overwrite the files.
    command = ["fio", "--output-format=json", *(["--readonly"] if direction == "read" else []), "-"]
    done = subprocess.run(
        command,
        input=_job_file(direction, names, size, depth),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise TransferError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    # fio may print notes before the JSON.
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    # Compute the time from the bandwidth, because fio leaves out a partial piece at the end of a file.
    return size * len(names) / float(job[direction]["bw_bytes"])


def _job_file(direction: str, names: Sequence[str], size: int, depth: int) -> str:
    settings = {
        "rw": direction,
        "direct": 1,
        "ioengine": "libaio",
        "bs": min(size, _PIECE_BYTES),
        "iodepth": _PIECES,
        "filesize": size,
        "thread": 1,
        "group_reporting": 1,
        "file_service_type": "sequential",
        # Like a thread of the file tier, a job handles one file at a time, from its begin to its end.
        "openfiles": 1,
        "fallocate": "none",
    }
    if direction == "write":
        # As chunks: new files with other bytes each time, which are on the disk at the end.
        settings |= {"create_on_open": 1, "fsync_on_close": 1, "refill_buffers": 1}
    lines = ["[global]", *(f"{name}={value}" for name, value in settings.items())]
    for number in range(depth):
        if share := names[number::depth]:
            lines += [f"[job{number}]", f"size={size * len(share)}", f"filename={':'.join(share)}"]
    return "\n".join(lines)


def _thread_writes(folder: Path, pool: ThreadPoolExecutor, files: int, size: int) -> CallMover:
    """Return a mover that writes new files with threads, in a new subfolder that it removes.

    Each thread writes one file at a time. The time ends when all data is on the disk.
    """
    content = random_pages(size)

    def move() -> float:
        with TemporaryDirectory(dir=folder) as made:
            paths = [f"{made}/{number}" for number in range(files)]
            write = partial(_write_file, content=content)
            return pool_mover(_THREADS, files * size, pool, write, paths).move()

    return CallMover(_THREADS, files * size, move)


def _thread_reads(pool: ThreadPoolExecutor, files: Sequence[Path], *, direct: bool = True) -> CallMover:
    """Return a mover that reads files with threads, each one file at a time.

    Without direct I/O, the files are in the page cache after the first round, which does not count.
    """
    into = [(file, whole_pages(file.stat().st_size)) for file in files]
    name, size = _THREADS if direct else _CACHED_THREADS, sum(len(memory) for _, memory in into)
    return pool_mover(name, size, pool, partial(_read, direct=direct), into)


def _write_file(path: str, content: memoryview) -> None:
    """Create a file of page-aligned memory, and wait until its data is on the disk."""
    # An old file has its blocks already, and is quicker to write.
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(fd, [content])
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _read(what: tuple[Path, memoryview], *, direct: bool) -> None:
    fd = os.open(what[0], os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_all(fd, [what[1]], direct=direct)
    finally:
        os.close(fd)
