"""Cases of the file tier: store and load durable chunks, compared with raw files of the same size.

The limit is the speed of raw files. They are written and read by threads of this process, and by fio if it is
installed; the faster of the two counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.bench.movers import Mover
from kvferry.bench.rank_chunks import CHUNK_TOKENS
from kvferry.bench.raw_files import (
    FioReads,
    FioWrites,
    ThreadWrites,
    has_fio,
    random_pages,
    thread_reads,
    write_file,
)
from kvferry.bench.storage_chunks import (
    LoadMover,
    RandomChunks,
    StoreMover,
    bench_namespace,
    chunks_per_move,
    open_queue,
    store_all,
)
from kvferry.bench.tier_cases import TierCase
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.files.settings import FileSettings
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.format.chunk import Chunk

STORE_RATIO, LOAD_RATIO = 0.7, 0.8


def tier_cases(stack: ExitStack, group: CanonicalGroup, path: Path, depths: Sequence[int]) -> list[TierCase]:
    """Return the benchmark cases of the file tier: storing and loading chunks, compared with raw files.

    There are two cases per depth, the first for storing and the second for loading. This function also writes
    the files that the loading cases read.

    Args:
        stack: exit stack. When it is closed, it ends the threads and removes the files.
        group: format in which chunks are stored.
        path: existing folder for the files.
        depths: depths to measure. A depth is a number of chunks in flight at a time.

    Raises:
        ConfigError: memory cannot be allocated, or the folder cannot be used.
        TransferError: a chunk could not be stored.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
    count = chunks_per_move(max(depths))
    chunks, into = (stack.enter_context(RandomChunks(group, CHUNK_TOKENS, count)) for _ in range(2))
    size = Chunk(bytes(32), chunks.keys[0], (chunks.group,)).file_bytes
    queue = stack.enter_context(
        open_queue(stack.enter_context(_empty_tier(folder, chunks)), FileSettings.kind)
    )
    store_all(queue, chunks, count, depth=8)
    files = _write_files(folder, count, size)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-files"))
        number = chunks_per_move(depth)
        writes: list[Mover] = [ThreadWrites(folder, pool, number, size)]
        reads: list[Mover] = [thread_reads(pool, files[:number])]
        if has_fio():
            writes.append(FioWrites(folder, depth, number, size))
            reads.append(FioReads(depth, files[:number]))
        stores = StoreMover(FileSettings.kind, lambda: _empty_tier(folder, chunks), chunks, depth)
        loads = LoadMover(queue, chunks, into, depth)
        found.append(_case("store", depth, STORE_RATIO, stores, writes))
        found.append(_case("load", depth, LOAD_RATIO, loads, reads))
    return found


def _case(direction: str, depth: int, target: float, ours: Mover, limits: Sequence[Mover]) -> TierCase:
    return TierCase(
        tier=FileSettings.kind,
        direction=direction,
        depth=depth,
        target=target,
        ours=ours,
        limits=tuple(limits),
    )


@contextmanager
def _empty_tier(folder: Path, chunks: RandomChunks) -> Iterator[FileTier]:
    """Yield an empty file tier in a new subfolder of `folder`. Remove the subfolder at the end.

    Args:
        folder: existing folder.
        chunks: chunks to store; they determine the tier's capacity and namespace.
    """
    with TemporaryDirectory(dir=folder) as root:
        capacity = 2 * len(chunks) * chunks.chunk_bytes
        yield FileTier(root, bench_namespace(chunks.group), capacity=capacity, durable=True)


def _write_files(folder: Path, count: int, size: int) -> list[Path]:
    """Write `count` files of `size` random bytes to a new subfolder of `folder`, and return their paths."""
    raw = folder / "raw"
    raw.mkdir()
    content = random_pages(size)
    files = [raw / str(number) for number in range(count)]
    for file in files:
        write_file(str(file), content)
    return files
