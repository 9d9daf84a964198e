"""The holder's end of the fleet channel: one thread that answers questions about chunks in host memory.

The engine's thread goes on meanwhile, so a chunk may be evicted at any moment. `HeldChunks` looks at the
chunk before and after it computes a digest: if the host tier has returned the same object both times, the
bytes of the slot were not changed in between. A change after the answer shows in the reader's digest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvferry.geometry import Region
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.fleet.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    AskHeld,
    AskMemory,
    ChunkPlace,
    Held,
    HostMemory,
    NoChunk,
    OtherProtocol,
    Reply,
    Request,
    decode_request,
)
from kvferry.tiers.format.decode import chunk_group, content_digest
from kvferry.tiers.host.tier import HostTier
from kvferry.transport.addresses import AllowedPeers, PortRange
from kvferry.transport.agent import Agent
from kvferry.transport.lease import LeaseWords
from kvferry.transport.listener import Listener
from kvferry.transport.messages import encode
from kvferry.transport.security import Keys


class HeldChunks:
    """The chunks in one engine's host memory, as other threads than the engine's may look at them.

    Args:
        memory_at: map an offset and a size, in bytes, to memory of the arena.
        groups: KV cache groups with the formats of their chunks.
        namespace: digest of the namespace of the chunks.
    """

    def __init__(
        self,
        host: HostTier,
        memory_at: Callable[[int, int], memoryview],
        groups: Sequence[CanonicalGroup],
        namespace: bytes,
    ) -> None:
        self.namespace = namespace
        self._host, self._memory_at = host, memory_at
        self._groups = tuple(chunk_group(group, 0) for group in groups)

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return self._host.contains(keys)

    def find(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Return offset, size in bytes, and digest of a chunk; None if it is not in host memory."""
        chunk = self._host.peek(key)
        if chunk is None:
            return None
        digest = chunk.digest
        if not digest:
            body = self._memory_at(chunk.offset, chunk.size)
            digest = content_digest(self.namespace, key, self._groups[chunk.group], body)
            # Else the slot may have been filled with another chunk while its bytes were read.
            if self._host.peek(key) is not chunk:
                return None
            chunk.digest = digest
        return chunk.offset, chunk.size, digest


class ServingRate:
    """Limits how many bytes per second other engines are told to read: a bucket that fills steadily.

    >>> now = 0.0
    >>> rate = ServingRate(100, clock=lambda: now)
    >>> rate.take(80), rate.take(80), rate.take(80)
    (True, True, False)
    >>> now = 1.0
    >>> rate.take(80)
    True
    """

    def __init__(self, bytes_per_second: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with what a second allows. None for no limit."""
        self._rate, self._clock = bytes_per_second, clock
        self._left, self._at = float(bytes_per_second or 0), clock()

    def take(self, size: int) -> bool:
        """Return whether `size` bytes may be read now. A chunk larger than what is left still may."""
        if self._rate is None:
            return True
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, float(self._rate))
        self._at = now
        if self._left <= 0:
            return False
        self._left -= size
        return True


class FleetServer:
    """A thread that answers other engines' questions about the chunks in host memory.

    Attributes:
        port: port of the channel.
        incarnation: random number that identifies this run of the engine.
        served: number of chunks whose place was told to a reader, and `served_bytes` their size.
        refused: number of times that a reader was told to read elsewhere, because of the rate.
    """

    def __init__(
        self,
        chunks: HeldChunks,
        agent: Agent,
        arena: Region,
        words: LeaseWords,
        *,
        host: str,
        port: int | PortRange,
        keys: Keys,
        peers: AllowedPeers,
        rate: ServingRate,
    ) -> None:
        """Bind the socket, and start the thread.

        Args:
            agent: agent with which `arena` and the memory of `words` are registered.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.incarnation = words.incarnation
        self.served = self.served_bytes = self.refused = 0
        self._chunks, self._rate, self._words = chunks, rate, words  # readers read the words' memory
        self._memory = HostMemory(
            0, words.incarnation, agent.metadata(), arena.address, arena.length, words.address
        )
        self._listener = Listener("fleet channel", host, port, keys, MAX_REQUEST_BYTES, peers=peers)
        self.port = self._listener.port
        self._listener.serve(
            "kvferry-fleet-server", lambda _, data: encode(self.answer(decode_request(data)))
        )

    @property
    def rejected(self) -> int:
        """Number of messages that could not be decoded."""
        return self._listener.rejected

    def close(self) -> None:
        self._listener.close()

    def answer(self, message: Request) -> Reply:
        """Return the reply to a message."""
        number = message.number
        if message.protocol != PROTOCOL:
            return OtherProtocol(number, PROTOCOL)
        if isinstance(message, AskMemory):
            return structs.replace(self._memory, number=number)
        ours = message.namespace == self._chunks.namespace
        if isinstance(message, AskHeld):
            mask = self._chunks.contains(message.keys) if ours else np.zeros(len(message.keys), np.bool_)
            return Held.of(number, self.incarnation, mask)
        found = self._chunks.find(message.key) if ours else None
        if found is None:
            return NoChunk(number)
        offset, size, digest = found
        if not self._rate.take(size):
            self.refused += 1
            return NoChunk(number, busy=True)
        self.served += 1
        self.served_bytes += size
        return ChunkPlace(number, self.incarnation, offset, size, digest)
