"""Whole chunks in the scheduler's process, gathered from the shares on all machines or scattered to them.

The scheduler's process copies the share of its own machine, and READs or WRITEs the others over NIXL. The
processes that own the other arenas take no part in that.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import TransferError
from kvferry.geometry import Region
from kvferry.geometry.canonical import CanonicalForm
from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.shares import share_copies
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.shares.arena import FarArena
from kvferry.transport.addresses import PortRange
from kvferry.transport.agent import Agent, Operation, restrict_ucx_to
from kvferry.transport.blocking import BlockingTransfers
from kvferry.transport.lease import new_incarnation

logger = logging.getLogger(__name__)

# Memory for one whole chunk: uint8 of shape (bytes,).
Buffer: TypeAlias = npt.NDArray[np.uint8]


class ShareExchange:
    """Gathers chunks from the shares on all machines, and scatters chunks to them.

    The engine's thread creates, connects and closes it. Any thread may call the other methods, which block.

    Attributes:
        lost: why an arena cannot be reached any more; empty while all can. Nothing is transferred then, and
            the caller must not use any slot again: bytes of the failed transfer may still arrive.
    """

    def __init__(
        self,
        arena: Arena,
        whole: CanonicalForm,
        shares: Sequence[CanonicalForm],
        names: Sequence[str],
        *,
        buffers: int,
        host: str,
        ports: PortRange | None,
    ) -> None:
        """Start a NIXL agent, and register memory for so many whole chunks.

        Args:
            arena: of this machine, whose share is the first.
            names: what messages call each other machine.

        Raises:
            ConfigError: NIXL does not start.
            Incompatible: the shares are not those of a whole chunk.
        """
        self.lost = ""
        self._arena, self._names = arena, names
        self._copies = share_copies(whole, shares)
        self._groups = {group.label: number for number, group in enumerate(whole.groups)}
        self._chunk_bytes = max(group.chunk_bytes for group in whole.groups)
        self._map = mmap.mmap(-1, buffers * self._chunk_bytes)
        memory = np.frombuffer(self._map, np.uint8)
        self._free = list(memory.reshape(buffers, self._chunk_bytes))
        with restrict_ucx_to(host, ports):
            # It reads and writes, and nobody reads its memory.
            self._agent = Agent(f"kvferry-shares/{new_incarnation():x}", progress=False)
        region = Region(memory.ctypes.data, len(memory))
        self._agent.register([region])
        self._transfers = BlockingTransfers(self._agent, region)
        self._peers: list[tuple[str, Region]] = []
        self._running, self._lock = 0, threading.Lock()

    def connect(self, arenas: Sequence[FarArena]) -> None:
        """Load the transport metadata of all other machines' arenas. Raise TransferError if that fails."""
        self._peers = [(self._agent.add_peer(one.agent), one.region) for one in arenas]

    def take_buffers(self, count: int) -> queue.SimpleQueue[Buffer]:
        """Take so many of the buffers, for one kind of operation of one tier, which delays no other."""
        found: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(count):
            found.put(self._free.pop())
        return found

    def move(self, operation: Operation, group: str, share: memoryview, chunk: Buffer) -> None:
        """READ the shares of a chunk from all machines into whole memory, or WRITE a whole chunk to them.

        Args:
            group: label of its KV cache group.
            share: this machine's share, in the arena. A WRITE mutates it, and those of the other machines.
            chunk: a buffer of this object. A READ mutates it.

        Raises:
            TransferError: an arena cannot be reached. Neither the buffer of a READ nor any slot (`lost`) may
                be used again.
        """
        number, memory, reads = self._groups[group], np.frombuffer(share, np.uint8), operation == "READ"
        offset = memory.ctypes.data - self._arena.region.address
        for machine, of_share in enumerate(self._copies):
            runs = of_share[number].gathered if reads else of_share[number].scattered
            whole, part = (runs.dst, runs.src) if reads else (runs.src, runs.dst)
            if machine:
                self._run(operation, machine, chunk.ctypes.data + whole, offset + part, runs.length)
            elif reads:
                _copy(runs, memory, chunk)
            else:
                _copy(runs, chunk, memory)

    def close(self) -> None:
        """End the agent. If a transfer hangs, leave it and its memory as they are."""
        with self._lock:
            if self._running:
                return
            self.lost = self.lost or "the engine ends"
        self._agent.close()

    def _run(
        self,
        operation: Operation,
        machine: int,
        ours: Int64s,
        offsets: Int64s,
        length: Int64s,
    ) -> None:
        with self._in_flight():
            peer, there = self._peers[machine - 1]
            try:
                self._transfers.run(operation, peer, there, ours, there.address + offsets, length)
            except TransferError as error:
                self.lost = f"{self._names[machine - 1]} cannot be reached: {error}"
                raise TransferError(self.lost) from error

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        with self._lock:
            if self.lost:
                raise TransferError(self.lost)
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1


def _copy(runs: Descriptors, source: Buffer, into: Buffer) -> None:
    for src, dst, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        # As arrays, which let other threads run meanwhile.
        into[dst : dst + length] = source[src : src + length]
