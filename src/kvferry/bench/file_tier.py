"""The file tier: a file store that keeps durably, beside files of the same size in the same folder.

The limit is the faster of threads of this process that write and read whole files, and of fio if it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.bench.chunks import CHUNK_TOKENS
from kvferry.bench.contest import Contest
from kvferry.bench.fio import FioReads, FioWrites, has_fio
from kvferry.bench.movers import Mover
from kvferry.bench.raw_files import ThreadReads, ThreadWrites, random_pages, write_file
from kvferry.bench.slow_tier import Bodies, Loads, Stores, chunks_at, namespace, queue_over, store_all
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.files.tier import FileTier
from kvferry.tiers.format.chunk import Chunk

STORE_RATIO, LOAD_RATIO = 0.7, 0.8


def contests(stack: ExitStack, group: CanonicalGroup, path: Path, depths: Sequence[int]) -> list[Contest]:
    """Stores and loads at every depth.

    Args:
        stack: ends threads, and removes what was written.
        group: what chunks hold.
        path: the folder, which exists.
        depths: chunks under way at a time.

    Raises:
        ConfigError: memory, or the folder, cannot be used.
        TransferError: a chunk could not be stored.
    """
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=path)))
    count = chunks_at(max(depths))
    bodies, into = (stack.enter_context(Bodies(group, CHUNK_TOKENS, count)) for _ in range(2))
    size = Chunk(bytes(32), bodies.keys[0], (bodies.group,)).file_bytes
    queue = stack.enter_context(queue_over(stack.enter_context(_fresh(folder, bodies))))
    store_all(queue, bodies, count, depth=8)
    files = _files(folder, count, size)
    found = []
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-files"))
        number = chunks_at(depth)
        writes: list[Mover] = [ThreadWrites(folder, pool, number, size)]
        reads: list[Mover] = [ThreadReads(pool, files[:number])]
        if has_fio():
            writes.append(FioWrites(folder, depth, number, size))
            reads.append(FioReads(depth, files[:number]))
        stores = Stores(lambda: _fresh(folder, bodies), bodies, depth)
        loads = Loads(queue, bodies, into, depth)
        found.append(Contest("file", "store", depth, STORE_RATIO, stores, tuple(writes)))
        found.append(Contest("file", "load", depth, LOAD_RATIO, loads, tuple(reads)))
    return found


@contextmanager
def _fresh(folder: Path, bodies: Bodies) -> Iterator[FileTier]:
    """An empty store, which is removed."""
    with TemporaryDirectory(dir=folder) as root:
        capacity = 2 * len(bodies) * bodies.chunk_bytes
        yield FileTier(root, namespace(bodies.group), capacity=capacity, durable=True)


def _files(folder: Path, count: int, size: int) -> list[Path]:
    """As many files of a size, in a folder of their own."""
    raw = folder / "raw"
    raw.mkdir()
    content = random_pages(size)
    files = [raw / str(number) for number in range(count)]
    for file in files:
        write_file(str(file), content)
    return files
