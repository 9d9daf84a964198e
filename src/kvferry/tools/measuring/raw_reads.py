"""READs by NIXL without kvferry, from the memory of a producer to the memory of a reader."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq

from kvferry.common.errors import TransferError
from kvferry.memory import AddressSpace, PoolCells, region_over
from kvferry.planning import ONE_CELL, DescriptorIndices, PoolCopies, Strategy, StridedCopy
from kvferry.tools.measuring.producer_process import WaitLimit
from kvferry.tools.measuring.reader import Reader
from kvferry.tools.measuring.simulated import SimulatedEngine
from kvferry.transport import (
    Agent,
    ConnectedPeer,
    LaneResources,
    ReadOrder,
    ReadState,
    StagingArea,
    TransferSettings,
)

# So large that the work per descriptor does not matter.
LARGE_BYTES = 2 << 20
_POLL_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class PreparedLists:
    """NIXL's prepared descriptor lists, and the `indices` of the descriptors to read in both."""

    local: Any
    remote: Any
    indices: DescriptorIndices
    bytes: int


class RawReads:
    """A NIXL agent that reads from one engine of the producer process into a reader's KV cache."""

    def __init__(self, reader: Reader, peer: int = 0) -> None:
        self._reader, self._number = reader, peer
        # NIXL requires that agents have different names.
        self._agent = Agent(f"bench-raw/{time.monotonic_ns():x}", progress=False)
        ours, settings = reader.cache.geometry, TransferSettings(Strategy.DIRECT, staging_bytes=0)
        area, words = StagingArea(0, ours.regions[0]), np.zeros(1, np.uint64)
        self._lane = LaneResources(self._agent, ours, area, words, zmq.Context(), settings=settings)
        self._agent.register([*ours.regions, self._lane.words_region])
        self._peer = ConnectedPeer(self._lane, reader.cards[peer])
        self._extra: list[Any] = []

    def same_descriptors(self, source: SimulatedEngine) -> PreparedLists:
        """Prepare a READ of the same descriptors that kvferry reads to load a request, from one rank."""
        ours = self._reader.engine
        lease = self._reader.claim_lease("same descriptors", self._number)
        plan = self._peer.plan(
            ReadOrder(
                key="",
                peer="",
                span=source.span,
                src_tables=source.tables,
                dst_tables=ours.tables,
                lease=lease,
            )
        )
        self._reader.acknowledge("same descriptors")
        ((rank, indices),) = plan.direct
        return PreparedLists(rank.local, rank.remote, indices, sum(plan.figures().bytes_by_group))

    def equal_descriptors(self, size: int, length: int = LARGE_BYTES) -> PreparedLists:
        """Prepare a READ of descriptors of equal length, at random places in the KV caches of both sides.

        Args:
            size: bytes to read. Reduced to the size of the smaller cache, and to whole descriptors.
            length: bytes of a descriptor. Reduced to `size` if it is larger.
        """
        ours = self._reader.cache.geometry.regions[0]
        theirs = self._reader.cards[self._number][0].geometry.regions[0]
        room = min(ours.length, theirs.length)
        length = min(length, size, room)
        count, places = min(size, room) // length, room // length
        local, remote = (
            self._agent.prepare(owner, region, np.array([[region.address, length, length, places]], np.int64))
            for owner, region in ((None, ours), (self._peer.sources[0].agent, theirs))
        )
        self._extra += [local, remote]
        shuffle = np.random.default_rng(3).permutation
        indices = DescriptorIndices(*(shuffle(places)[:count].astype(np.int32) for _ in range(2)))
        return PreparedLists(local, remote, indices, count * length)

    def read(self, lists: PreparedLists) -> float:
        """Read all descriptors once, and return the seconds from creating the NIXL transfer to its end."""
        agent, indices = self._agent, lists.indices
        limit = WaitLimit(self._reader.producer.check)
        started = time.perf_counter()
        handle = agent.transfer("READ", lists.local, indices.dst, lists.remote, indices.src)
        state = agent.post(handle)
        while state is ReadState.IN_FLIGHT:
            limit.check()
            # Polling without a pause would slow down NIXL's own thread, which does the work.
            time.sleep(_POLL_SECONDS)
            state = agent.state(handle)
        seconds = time.perf_counter() - started
        agent.release(handle)
        if state is ReadState.FAILED:
            self._reader.producer.check()
            raise TransferError("NIXL failed while reading from the producer process")
        return seconds

    def time_creation(self, lists: PreparedLists) -> float:
        started = time.perf_counter()
        handle = self._agent.transfer("READ", lists.local, lists.indices.dst, lists.remote, lists.indices.src)
        seconds = time.perf_counter() - started
        self._agent.release(handle)
        return seconds

    def close(self) -> None:
        for handle in self._extra:
            self._agent.release_list(handle)
        self._peer.close()
        self._lane.context.destroy(linger=0)
        self._agent.close()


class HostCopy:
    """Blocks of one run each, in random order, and as much host memory.

    Args:
        size: number of bytes to copy; rounded down to whole blocks, but at least one block.
        engine_bytes: run length in bytes from which the GPU's copy engine copies instead of the kernel.

    Attributes:
        pool, host: memory of the blocks and of the host, uint8 of shape (bytes,).
        order: block of each run in `host`, int64 of shape (blocks,).
    """

    def __init__(self, run: int, size: int, device: str, *, engine_bytes: int) -> None:
        blocks = max(1, size // run)
        self.pool = torch.zeros(blocks * run, dtype=torch.uint8, device=device)
        # As the host tier pins its arena: a GPU cannot copy from other memory by itself.
        self.host = torch.zeros(blocks * run, dtype=torch.uint8, pin_memory=device != "cpu")
        # As in an engine that has run for a while, where free blocks are scattered.
        self.order = np.random.default_rng(5).permutation(blocks)
        self._offsets = np.arange(blocks) * run
        region = region_over(self.pool)
        self._store, self._load = (
            PoolCells(
                [PoolCopies(ONE_CELL, (copy,))],
                AddressSpace([region]),
                side=side,
                stride=run,
                blocks=blocks,
                engine_bytes=engine_bytes,
            )
            for side, copy in (
                ("src", StridedCopy(region.address, 0, run)),
                ("dst", StridedCopy(0, region.address, run)),
            )
        )

    def store(self) -> float:
        return self._timed(self._store)

    def load(self) -> float:
        return self._timed(self._load)

    def _timed(self, cells: PoolCells) -> float:
        (part,) = cells.parts
        memory = self.host.numpy() if cells.on_host else self.host
        started = time.perf_counter()
        cells.copy(part, part.places(self.order, np.zeros_like(self.order)), memory, self._offsets)
        cells.wait()
        return time.perf_counter() - started
