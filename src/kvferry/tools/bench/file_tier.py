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

from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.files.tier import FileSettings, FileTier
from kvferry.tiers.format.chunk import Chunk
from kvferry.tools.bench.movers import (
    fio_reads,
    fio_writes,
    has_fio,
    random_pages,
    thread_reads,
    thread_writes,
    write_file,
)
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS
from kvferry.tools.bench.storage_chunks import (
    RandomChunks,
    bench_namespace,
    chunks_per_move,
    load_mover,
    open_queue,
    store_all,
    store_mover,
)
from kvferry.tools.bench.tier_cases import TierCase

STORE_RATIO, LOAD_RATIO = 0.7, 0.8


def tier_cases(stack: ExitStack, group: CanonicalGroup, path: Path, depths: Sequence[int]) -> list[TierCase]:
    """Return two cases per depth, the first for storing and the second for loading.

    Args:
        stack: exit stack. When it is closed, it ends the threads and removes the files.
        group: format in which chunks are stored.
        path: existing folder for the files.
        depths: numbers of chunks in flight.

    Raises:
        ConfigError: memory cannot be allocated, or the folder cannot be used.
        TransferError: a chunk could not be stored.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
    count = chunks_per_move(max(depths))
    chunks, into = (stack.enter_context(RandomChunks(group, CHUNK_TOKENS, count)) for _ in range(2))
    # Raw files have the size of chunk files, with header and padding.
    size = Chunk(bytes(32), chunks.keys[0], (chunks.group,)).file_bytes
    queue = stack.enter_context(
        open_queue(stack.enter_context(_empty_tier(folder, chunks)), FileSettings.kind)
    )
    # For the loads, and not measured.
    store_all(queue, chunks, count, depth=8)
    files = _write_files(folder, count, size)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-files"))
        number = chunks_per_move(depth)
        writes, reads = [thread_writes(folder, pool, number, size)], [thread_reads(pool, files[:number])]
        if has_fio():
            writes.append(fio_writes(folder, depth, number, size))
            reads.append(fio_reads(depth, files[:number]))
        stores = store_mover(FileSettings.kind, lambda: _empty_tier(folder, chunks), chunks, depth)
        loads = load_mover(queue, chunks, into, depth)
        found += [
            TierCase(FileSettings.kind, "store", depth, STORE_RATIO, stores, tuple(writes)),
            TierCase(FileSettings.kind, "load", depth, LOAD_RATIO, loads, tuple(reads)),
        ]
    return found


@contextmanager
def _empty_tier(folder: Path, chunks: RandomChunks) -> Iterator[FileTier]:
    """Yield an empty file tier in a new subfolder of `folder`, which is removed at the end."""
    with TemporaryDirectory(dir=folder) as root:
        # Nothing is evicted, so no store waits for that.
        capacity = 2 * len(chunks) * chunks.chunk_bytes
        # Durable, because the raw files are too: both wait for the disk.
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
