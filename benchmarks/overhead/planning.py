"""Measure the time to plan one long request, before its first byte moves.

Planning uses the real geometry with invented addresses, so it needs no memory and no transport. It calls the
same code as a reading thread (lane), for the share of one thread. NIXL's time depends only on the number of
descriptors. It is measured with the same number of blocks and layers, and pages so small that they fit in
memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zmq

from kvferry.geometry import GroupKind, Region
from kvferry.planning.descriptors import Int64s
from kvferry.tools.measuring.producer_process import ProducerProcess
from kvferry.tools.measuring.raw_reads import RawReads
from kvferry.tools.measuring.reader import Reader, as_arrays
from kvferry.tools.measuring.rounds import Spread
from kvferry.tools.measuring.simulated import SimulatedEngine, simulate_engine
from kvferry.tools.models import ModelReading
from kvferry.tools.models.layout import lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from kvferry.tools.plan.side import EngineSide
from kvferry.transport.agent import Agent
from kvferry.transport.costs import TransferSettings, load_costs
from kvferry.transport.lane_connections import ConnectedPeer
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Outgoing, RankCard
from kvferry.transport.read_plan import ReadOrder
from kvferry.transport.staging import LaneResources, StagingArea

_WORDS = Region(1 << 30, 4096)
_TICKET = LeaseWord(0, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTimes:
    """The times to plan one request, in seconds.

    A segment is the part of a staged read that is gathered, read and scattered at once.

    Attributes:
        tokens: length of the request, in tokens.
        pages: number of pages to load, one per needed block and layer.
        strategies: strategy of each KV cache group.
        tables: time to convert the block tables of both sides to arrays.
        plan: time from then until the index arrays of the first READ are ready.
        ours: sum of `tables` and `plan`, the time before the first READ.
        chunks: time to create the index arrays of all later segments. A real transfer creates each after the
            one before is posted.
    """

    tokens: int
    pages: int
    strategies: tuple[str, ...]
    tables: Spread
    plan: Spread
    ours: Spread
    chunks: Spread


def measure(
    src: SimulatedEngine,
    dst: SimulatedEngine,
    repeats: int,
    rank: int = 0,
    lanes: int = TransferSettings().lanes,
) -> PlanningTimes:
    """Plan the first reading thread's share of a request from `src` to a rank of `dst`, and return the times.

    Args:
        src, dst: engine to read from, and engine that reads.
        repeats: number of counted rounds. Another round before them is not counted.
        rank: number of the reading rank in `dst`.
        lanes: number of reading threads that share the request.
    """
    tables, plan, chunks = [], [], []
    with closing(PlannedPeer(src, dst, rank)) as paper:
        src_lists, dst_lists = ([table.tolist() for table in one.tables] for one in (src, dst))
        for _ in range(repeats + 1):
            started = time.perf_counter()
            arrays = as_arrays(src_lists), as_arrays(dst_lists)
            tables.append(time.perf_counter() - started)
            first, later = paper.plan(ReadOrder("", "", src.span, *arrays, _TICKET, shares=lanes))
            plan.append(first)
            chunks.append(later)
        pages = sum(
            int((table > 0).sum()) * len(group.layers)
            for table, group in zip(dst.tables, paper.ours.groups, strict=True)
        )
    # Drop the first of each, because it touches memory for the first time.
    del tables[0], plan[0], chunks[0]
    ours = [a + b for a, b in zip(tables, plan, strict=True)]
    return PlanningTimes(
        tokens=dst.tokens,
        pages=pages,
        strategies=paper.strategies,
        tables=Spread.of(tables),
        plan=Spread.of(plan),
        ours=Spread.of(ours),
        chunks=Spread.of(chunks),
    )


def time_making(reading: ModelReading, tokens: int, repeats: int, settings: Mapping[str, str]) -> Spread:
    """Return the time in which NIXL creates a transfer with one descriptor per page of a request, in seconds.

    Args:
        reading: description of the model's KV cache.
        tokens: length of the request, in tokens.
        repeats: number of counted rounds. Another round before them is not counted.
        settings: environment variables for the transport.

    Raises:
        ConfigError: memory or NIXL cannot be used.
        TransferError: the other process cannot be read from.
    """
    small = small_pages(reading)
    src, dst = (
        simulate_engine(name, small, EngineSide(), tokens, seed=seed)
        for seed, name in enumerate(("src", "dst"))
    )
    with (
        ProducerProcess([src], settings) as producer,
        Reader(dst, producer) as reader,
        closing(RawReads(reader)) as raw,
    ):
        lists = raw.same_descriptors(src)
        return Spread.of([raw.time_creation(lists) for _ in range(repeats + 1)][1:])


def small_pages(reading: ModelReading) -> ModelReading:
    """Return a model with as many layers, but with full attention and only 16 bytes per token and layer.

    A request has the same number of layers and descriptors per block, but needs much less memory.
    """
    stored = tuple(StoredField(name, 2, 1, (("content", 4),)) for name in ("k", "v"))
    layers = tuple(LayerCache(GroupKind.FULL, 0, stored) for _ in reading.cache.layers)
    return replace(reading, cache=ModelCache(f"{reading.cache.name}, small pages", layers))


class _PaperAgent(Agent):
    """A stand-in for a NIXL agent that counts descriptors and reads nothing."""

    def __init__(self) -> None:
        self.name = "paper"
        self.descriptors = 0

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def drop_peer(self, name: str) -> None:
        pass

    def prepare(self, *given: Any) -> Any:
        rows: Int64s = given[-1]
        self.descriptors += int(rows[:, 3].sum())
        return None

    def release_list(self, handle: Any) -> None:
        pass


class PlannedPeer:
    """A peer that was prepared for reading in the same way as by a reading thread, without memory.

    Attributes:
        ours: geometry of the reading rank.
        strategies: strategy of each KV cache group in the last plan.
        descriptors: number of descriptors that were prepared for both sides.
    """

    def __init__(self, src: SimulatedEngine, dst: SimulatedEngine, rank: int) -> None:
        self.ours = lay_out(dst.model, dst.shape)[rank]
        self.strategies: tuple[str, ...] = ()
        settings = TransferSettings(costs=load_costs())
        self._landing = StagingArea(settings.staging_bytes, self.ours.regions[0])
        paper, words = _PaperAgent(), np.zeros(_WORDS.length // 8, np.uint64)
        self._lane = LaneResources(paper, self.ours, self._landing, words, zmq.Context(), settings=settings)
        self._peer = ConnectedPeer(self._lane, self._cards(src))
        self.descriptors = paper.descriptors

    def plan(self, order: ReadOrder) -> tuple[float, float]:
        """Plan a load. Return the seconds until the first READ is ready, and those for later index arrays."""
        started = time.perf_counter()
        plan = self._peer.plan(order)
        chunks = (
            (part.method, cells) for part in plan.segmented for cells in part.method.segments(part.cells)
        )
        for way, cells in itertools.islice(chunks, 1):
            way.indices(cells, 0, 0)
        first = time.perf_counter()
        for way, cells in chunks:
            way.indices(cells, 0, 0)
        later = time.perf_counter() - first
        self.strategies = tuple(map("+".join, plan.figures().strategies_by_group))
        return first - started, later

    def close(self) -> None:
        """Close the peer and its sockets."""
        self._peer.close()
        self._lane.context.destroy(linger=0)

    def _cards(self, src: SimulatedEngine) -> Sequence[RankCard]:
        area = self._landing.region
        # No server listens on this port, and no request is sent to it.
        outgoing = Outgoing("127.0.0.1", 9, area.address, area.length, self._landing.units)
        return [
            RankCard(rank, f"rank {number}".encode(), _WORDS.address, 64 + self._landing.units, 1, outgoing)
            for number, rank in enumerate(lay_out(src.model, src.shape))
        ]
