"""Cases of the host tier: copy chunks between a rank's blocks and host memory, compared with memcpy.

kvferry's mover does the same work as a worker's copying thread. The depth is the number of threads, each with
its share of the chunks; a connector has one thread per rank. The limit is a memcpy of the same bytes by the
same number of threads, each in one piece. The control is a copy in contiguous runs that are as short as those
of the engine's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from operator import call

import numpy as np
import numpy.typing as npt

from kvferry.common.units import format_bytes
from kvferry.connector import Piece, StoreOrder
from kvferry.tools.bench.movers import pool_mover
from kvferry.tools.bench.rank_chunks import RankPair
from kvferry.tools.bench.rounds import TierCase

TARGET_RATIO = 0.8
_APART = 16


def tier_cases(stack: ExitStack, ranks: RankPair, depths: Sequence[int]) -> list[TierCase]:
    """Return the cases of each depth: storing, then loading. `stack` ends the threads.

    `ranks` have at least one chunk for each thread of the largest depth.
    """
    found = []
    total, short = ranks.chunks * ranks.chunk_bytes, f"memcpy in runs of {format_bytes(ranks.run_bytes)}"
    for depth in depths:
        pool = stack.enter_context(ThreadPoolExecutor(depth, "bench-host"))
        cuts = [ranks.chunks * number // depth for number in range(depth + 1)]
        shares = [range(low, high) for low, high in pairwise(cuts)]
        for direction, orders in (("store", _store_call), ("load", _load_call)):
            ours, memcpy, control = (
                pool_mover(name, total, pool, call, calls)
                for name, calls in (
                    ("kvferry", [orders(ranks, share) for share in shares]),
                    ("memcpy", [_memcpy_call(ranks, direction, share) for share in shares]),
                    (short, [_copy_runs_call(ranks, direction, share) for share in shares]),
                )
            )
            tier = f"host, {ranks.layout}"
            found.append(TierCase(tier, direction, depth, TARGET_RATIO, ours, (memcpy,), (control,)))
    return found


def verify_copies(cases: Sequence[TierCase], ranks: RankPair) -> None:
    """Check that all cases copy the right bytes, or raise TransferError. Mutates host and loading memory."""
    for store, load in zip(cases[::2], cases[1::2], strict=True):
        ranks.clear()
        store.ours.move()
        load.ours.move()
        ranks.check()


def _store_call(ranks: RankPair, share: range) -> Callable[[], object]:
    return partial(
        ranks.routes(stores=True).store,
        StoreOrder("", _pieces(ranks, share), ranks.store_tables, range(ranks.tokens)),
    )


def _load_call(ranks: RankPair, share: range) -> Callable[[], object]:
    routes = ranks.routes(stores=False)
    return partial(routes.load, _pieces(ranks, share), ranks.span, ranks.load_tables, first=False)


def _pieces(ranks: RankPair, share: range) -> tuple[Piece, ...]:
    return tuple(Piece(0, number, number * ranks.chunk_bytes) for number in share)


def _memcpy_call(ranks: RankPair, direction: str, share: range) -> Callable[[], object]:
    to, of = (memory[_bytes(ranks, share)] for memory in _memories(ranks, direction))
    # One copy per thread is the quickest that this machine's memory allows.
    return partial(np.copyto, to, of)


def _copy_runs_call(ranks: RankPair, direction: str, share: range) -> Callable[[], object]:
    pairs = []
    for number in share:
        to, of = (memory[_bytes(ranks, range(number, number + 1))] for memory in _memories(ranks, direction))
        # Runs that are adjacent in one memory are far apart in the other.
        rows = (_APART, -1, ranks.run_bytes // 8)
        words = to.view(np.int64).reshape(rows), of.view(np.int64).reshape(rows[1], rows[0], rows[2])
        pairs.append((words[0], words[1].swapaxes(0, 1)))

    def copy() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    return copy


def _memories(ranks: RankPair, direction: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the memory to copy to and the memory to copy from, both uint8 of shape (bytes,)."""
    if direction == "store":
        return ranks.arena.memory, ranks.source.buffer.numpy()
    return ranks.destination.buffer.numpy(), ranks.arena.memory


def _bytes(ranks: RankPair, share: range) -> slice:
    return slice(share.start * ranks.chunk_bytes, share.stop * ranks.chunk_bytes)
