"""The host tier: chunks between a rank's blocks and an arena, beside memcpy.

A mover does what a connector's thread does with orders: cells chosen and checked, then copied. Depth is
threads, each with its share of the chunks; the connector has one per rank. Memcpy has as many threads and as
many bytes, contiguous, between the same memory; the aside cuts them into runs as short as the layout's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.bench.chunks import Ranks
from kvferry.bench.contest import Contest
from kvferry.cache.orders import LoadPart, Piece, StoreOrder
from kvferry.plan.units import size

TARGET_RATIO = 0.8
_APART = 16


def contests(stack: ExitStack, ranks: Ranks, depths: Sequence[int]) -> list[Contest]:
    """Stores and loads at every depth.

    Args:
        stack: ends the threads.
        ranks: at least as many chunks as the largest depth.
        depths: threads.
    """
    found = []
    total, short = ranks.chunks * ranks.chunk_bytes, f"memcpy in runs of {size(ranks.run_bytes)}"
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-host"))
        shares = _shares(ranks.chunks, depth)
        for way, orders in (("store", _stores), ("load", _loads)):
            ours = Threads("kvferry", total, pool, [orders(ranks, share) for share in shares])
            memcpy = Threads("memcpy", total, pool, [_contiguous(ranks, way, share) for share in shares])
            aside = Threads(short, total, pool, [_in_runs(ranks, way, share) for share in shares])
            found.append(
                Contest(f"host, {ranks.layout}", way, depth, TARGET_RATIO, ours, (memcpy,), (aside,))
            )
    return found


def prove(contests: Sequence[Contest], ranks: Ranks) -> None:
    """Store and load at every depth and compare all memory: what was timed copies what it should.

    Raises:
        TransferError: other bytes arrived.
    """
    for store, load in zip(contests[::2], contests[1::2], strict=True):
        ranks.wipe()
        store.ours.move()
        load.ours.move()
        ranks.check()


class Threads:
    """Every thread does one thing, all at once; a `Mover`."""

    def __init__(
        self, name: str, total: int, pool: ThreadPoolExecutor, what: Sequence[Callable[[], object]]
    ) -> None:
        self.name, self.bytes = name, total
        self._pool, self._what = pool, what

    def move(self) -> float:
        """Do it once; seconds until the last has ended."""
        started = time.perf_counter()
        for done in [self._pool.submit(one) for one in self._what]:
            done.result()
        return time.perf_counter() - started


def _shares(chunks: int, threads: int) -> list[range]:
    """Chunks dealt out, neighbours together."""
    cuts = [chunks * n // threads for n in range(threads + 1)]
    return [range(low, high) for low, high in pairwise(cuts)]


def _stores(ranks: Ranks, share: range) -> Callable[[], object]:
    return partial(
        ranks.routes(stores=True).store,
        StoreOrder("", _pieces(ranks, share), ranks.tables, range(ranks.tokens)),
    )


def _loads(ranks: Ranks, share: range) -> Callable[[], object]:
    part = LoadPart("", "", ranks.span, _pieces(ranks, share), ranks.tables, first=False)
    return partial(ranks.routes(stores=False).load, part)


def _pieces(ranks: Ranks, share: range) -> tuple[Piece, ...]:
    return tuple(Piece(0, number, number * ranks.chunk_bytes) for number in share)


def _contiguous(ranks: Ranks, way: str, share: range) -> Callable[[], object]:
    """As many bytes in one copy."""
    to, of = (memory[_bytes(ranks, share)] for memory in _memories(ranks, way))
    return partial(np.copyto, to, of)


def _in_runs(ranks: Ranks, way: str, share: range) -> Callable[[], object]:
    """As many bytes in runs, a copy per chunk; neighbours of one side are apart on the other."""
    pairs = []
    for number in share:
        to, of = (memory[_bytes(ranks, range(number, number + 1))] for memory in _memories(ranks, way))
        rows = (_APART, -1, ranks.run_bytes // 8)
        words = to.view(np.int64).reshape(rows), of.view(np.int64).reshape(rows[1], rows[0], rows[2])
        pairs.append((words[0], words[1].swapaxes(0, 1)))

    def copy() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    return copy


def _memories(ranks: Ranks, way: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Where to, and where from."""
    if way == "store":
        return ranks.arena.memory, ranks.source.buffer.numpy()
    return ranks.destination.buffer.numpy(), ranks.arena.memory


def _bytes(ranks: Ranks, share: range) -> slice:
    return slice(share.start * ranks.chunk_bytes, share.stop * ranks.chunk_bytes)
