"""Measure how fast a peer's memory can be read, before the first KV is read from it.

The transport chooses by itself how it carries a READ, and does not say how. On a machine without RDMA it may
carry GPU memory over TCP, many times slower than the machine's memory. So each lane times a few READs of each
rank of a new peer. The fastest counts, because other work on the machine only makes READs slower.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.geometry import Region
from kvferry.transport.agent import ReadState
from kvferry.transport.staging import Allocation, LaneResources

logger = logging.getLogger(__name__)

# Size of the smallest timed READ. The transfer takes many times as long as its start.
LEAST_BYTES = 1 << 20

ROUNDS = 5  # Number of READs. The first also connects, and does not count.

SPINS = 1000  # number of times that a READ is polled without a pause, which takes about 1 ms

PATIENCE_SECONDS = 1.0  # maximum seconds that orders wait for the measurement

# Factor up to which the calibrated cost is kept: a few READs on a busy machine tell no more. Measured on two
# busy cores: READs over TCP were 11 to 122 times slower than calibrated, others 4 to 7 times.
NEAR = 8.0

_LEAST = 1e-12  # seconds per byte, less than any memory needs


class ReadSpeed:
    """Times READs of one rank of a peer, step by step. Only the lane's thread uses it.

        NEW ─advance─▶ READING ─done, ROUNDS times─▶ ENDED
         └─no memory─────┴─failed──────────────────▶ ENDED, and nothing is known

    Attributes:
        costs: costs of transfers from this rank: those of the machine, with the measured cost of a byte if
            that differs by more than `NEAR`.
        ended: True if no further READ will be started.
        bytes_per_second: 0 until it is measured.
    """

    def __init__(self, lane: LaneResources, owner: str, memory: Region, size: int) -> None:
        """Do nothing yet. `advance` starts READs, of `size` bytes at most, of memory of the rank `owner`."""
        self.costs, self.bytes_per_second = lane.settings.costs, 0.0
        self._agent, self._landing, self._clock = lane.agent, lane.landing, lane.clock
        self._owner, self._memory, self._began = owner, memory, lane.clock()
        self._bytes = min(memory.length, lane.landing.largest_image, size)
        self.ended = self._bytes < LEAST_BYTES
        self._byte_seconds: list[float] = []
        self._taken: Allocation | None = None
        self._lists: list[Any] = []
        self._handle: Any = None
        self._started = 0.0

    @property
    def in_flight(self) -> bool:
        """True while a READ is in flight: the peer must stay connected."""
        return self._handle is not None

    @property
    def pending(self) -> bool:
        return not self.ended and self._clock() - self._began < PATIENCE_SECONDS

    def advance(self) -> None:
        """Start the next READ and poll it `SPINS` times, or take the time of one that has ended."""
        if self._handle is not None:
            self._take_time()
            return
        if self.ended:
            return
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - what reads KV from this peer will fail, and say why
            logger.debug("the speed of reads cannot be measured: %s", error)
            if self._handle is None:
                self.close()
        # On a busy machine, a thread that sleeps wakes up long after a fast READ has ended.
        for _ in range(SPINS):
            if self._handle is None:
                break
            self._take_time()

    def close(self) -> None:
        """Give back the memory and the lists. No READ may be in flight. Idempotent."""
        for each in self._lists:
            self._agent.release_list(each)
        if self._taken is not None:
            self._landing.free(self._taken)
        self._lists, self._taken, self.ended = [], None, True

    def _start(self) -> None:
        self._taken = self._taken or self._landing.allocate(1, self._bytes)
        if self._taken is None:  # reads hold the memory, and they matter more
            self.close()
            return
        if not self._lists:
            here = self._landing.region.address + self._taken.position * self._bytes
            self._lists = [self._list(None, replace(self._landing.region, address=here))]
            self._lists.append(self._list(self._owner, self._memory))
        local, remote = self._lists
        index = np.zeros(1, np.int32)
        self._started = self._clock()
        self._handle = self._agent.transfer("READ", local, index, remote, index)
        self._agent.post(self._handle)

    def _list(self, owner: str | None, region: Region) -> Any:
        return self._agent.prepare(owner, region, np.array([[region.address, self._bytes, self._bytes, 1]]))

    def _take_time(self) -> None:
        state = self._agent.state(self._handle)
        if state is ReadState.IN_FLIGHT:
            return
        seconds = self._clock() - self._started
        self._agent.release(self._handle)
        self._handle = None
        if state is ReadState.FAILED:
            self.close()
            return
        self._byte_seconds.append(seconds / self._bytes)
        if len(self._byte_seconds) == ROUNDS:
            byte = max(min(self._byte_seconds[1:]), _LEAST)
            self.bytes_per_second = 1 / byte
            if not 1 / NEAR <= byte / max(self.costs.read_byte_seconds, _LEAST) <= NEAR:
                self.costs = replace(self.costs, read_byte_seconds=byte)
            self.close()
