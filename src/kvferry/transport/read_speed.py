"""Measure, when a peer is connected, how fast its memory can be read.

The transport chooses by itself how it carries a READ, and does not say how. On a machine without RDMA it may
carry GPU memory over TCP, many times slower than the machine's memory. So each lane times a few READs of each
rank of a new peer. The fastest counts. Copies in this process's memory are timed between them: if they are
slower than calibrated, other work slows the machine down, and READs with it. Planning does not wait for this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.geometry import Region
from kvferry.planning.strategy import Costs
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.staging import Allocation, StagingArea

logger = logging.getLogger(__name__)

LEAST_BYTES, MOST_BYTES = 1 << 20, 4 << 20
"""Limits of the size in bytes of a timed READ, which depends on the memory that there is. The transfer takes
many times as long as its start, so a READ's time is that of its bytes."""

ROUNDS = 4
"""Number of READs. The first also connects, and does not count."""

_LEAST = 1e-12
"""Seconds per byte, less than any memory needs."""

NEAR = 2.0
"""Factor up to which the calibrated cost is kept: many READs measured it, and only few this one."""


class ReadSpeed:
    """Times READs of one rank of a peer, step by step. Only the lane's thread uses it.

    Attributes:
        costs: costs of transfers from this rank: those of the machine, with what a byte of a READ costs as it
            was measured, if that differs by more than `NEAR`.
        bytes_per_second: measured speed; 0 until it is measured.
    """

    def __init__(
        self,
        agent: Agent,
        owner: str,
        memory: Region,
        landing: StagingArea | None,
        costs: Costs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take memory to read into; `advance` starts the READs. Without enough of it, nothing is measured.

        Args:
            agent: NIXL agent of the lane.
            owner: NIXL's name of the rank.
            memory: memory of the rank to read, such as its KV cache.
            landing: staging area to read into; None to measure nothing.
            costs: measured transfer costs of this machine.
            clock: function that returns the current time in seconds.
        """
        self.costs, self.bytes_per_second = costs, 0.0
        self._agent, self._clock = agent, clock
        self._read_seconds: list[float] = []
        self._copy_seconds: list[float] = []
        self._bytes = min(memory.length, landing.largest_image if landing else 0, MOST_BYTES)
        self._handle: Any = None
        self._started = 0.0
        self._lists: list[Any] = []
        self._room: tuple[StagingArea, Allocation] | None = None
        if landing is None or self._bytes < LEAST_BYTES:
            return
        if (taken := landing.allocate(1, self._bytes)) is not None:
            self._room = landing, taken
            here = replace(landing.region, address=landing.region.address + taken.position * self._bytes)
            self._lists = [
                agent.prepare(name, region, np.array([[region.address, self._bytes, self._bytes, 1]]))
                for name, region in ((None, here), (owner, memory))
            ]

    @property
    def in_flight(self) -> bool:
        """True while a READ is in flight: the peer must stay connected."""
        return self._handle is not None

    @property
    def ended(self) -> bool:
        """True if the speed has been measured, or cannot be."""
        return self._room is None

    def advance(self, *, start: bool = True) -> bool:
        """Start the next READ, or take the time of one that has ended, without waiting.

        Return whether there was anything to do.

        Args:
            start: False to start no further READ.
        """
        if self._handle is not None:
            return self._take_time()
        if self.ended or not start:
            return False
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - what reads KV from this peer will fail, and say why
            logger.debug("the speed of reads cannot be measured: %s", error)
            if self._handle is None:
                self.close()
        return True

    def _take_time(self) -> bool:
        state = self._agent.state(self._handle)
        if state is ReadState.IN_FLIGHT:
            return False
        seconds = self._clock() - self._started
        self._agent.release(self._handle)
        self._handle = None
        if state is ReadState.DONE:
            self._read_seconds.append(seconds / self._bytes)
            self._time_copy()
        full = len(self._read_seconds) == ROUNDS
        if full:
            self._conclude()
        if full or state is ReadState.FAILED:
            self.close()
        return True

    def close(self) -> None:
        """Give back the memory and the lists. No READ may be in flight. Idempotent."""
        for each in self._lists:
            self._agent.release_list(each)
        if self._room is not None:
            area, taken = self._room
            area.free(taken)
        self._lists, self._room = [], None

    def _start(self) -> None:
        local, remote = self._lists
        index = np.zeros(1, np.int32)
        self._started = self._clock()
        self._handle = self._agent.read(local, index, remote, index)
        self._agent.post(self._handle)

    def _time_copy(self) -> None:
        source, target = np.ones((2, self._bytes), np.uint8)
        started = self._clock()
        np.copyto(target, source)
        self._copy_seconds.append((self._clock() - started) / self._bytes)

    def _conclude(self) -> None:
        byte = max(min(self._read_seconds[1:]), _LEAST)
        self.bytes_per_second = 1 / byte
        slowdown = max(min(self._copy_seconds) / max(self.costs.copy_byte_seconds, _LEAST), 1.0)
        if not 1 / NEAR <= byte / slowdown / max(self.costs.read_byte_seconds, _LEAST) <= NEAR:
            self.costs = replace(self.costs, read_byte_seconds=byte / slowdown)

