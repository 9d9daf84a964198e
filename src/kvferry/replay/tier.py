"""A simulated tier: which chunks it holds, how many bytes they have, and what it evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.tiers.eviction import EvictionPolicy

UNLIMITED = 1 << 62
"""Capacity in bytes of a tier without a limit."""


@dataclass(slots=True)
class TierCounts:
    """The chunks that a simulated tier has stored, given to loads and evicted so far.

    Attributes:
        stored, read, evicted, dropped: numbers of chunks. A chunk is dropped if there is no room for it.
        stored_bytes, read_bytes, evicted_bytes: bytes of these chunks.
        most_bytes: maximum of the bytes that the tier held in these chunks.
    """

    stored: int = 0
    stored_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    dropped: int = 0
    most_bytes: int = 0

    @classmethod
    def sum(cls, each: Sequence[TierCounts]) -> TierCounts:
        """Return the sums of all numbers."""
        return cls(*(sum(getattr(one, name) for one in each) for name in cls.__slots__))


class SimulatedTier:
    """The chunks of a tier. The eviction policy is the one that serves.

    The capacity is counted in bytes of chunks. A real host tier divides its memory into slabs of one chunk
    size each, so with chunks of several sizes it holds slightly less.

    Attributes:
        name: name of the tier, such as ``host``.
        chunk_bytes: bytes of a chunk of each KV cache group, as the tier keeps it.
        capacity_bytes: maximum total bytes of all chunks.
        used_bytes: bytes of all chunks that the tier holds.
        held: KV cache group of each chunk that the tier holds, by key. Callers must not change it.
        counts: numbers of chunks of each KV cache group so far.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
    ) -> None:
        """Create an empty tier.

        Args:
            name: name of the tier.
            capacity_bytes: maximum total bytes of all chunks; `UNLIMITED` for no limit.
            chunk_bytes: bytes of a chunk of each KV cache group.
            policy: function that returns an eviction policy for a capacity in bytes.
        """
        self.name, self.chunk_bytes = name, tuple(chunk_bytes)
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.held: dict[bytes, int] = {}
        self.counts = [TierCounts() for _ in chunk_bytes]
        self._used = [0] * len(self.counts)
        self._policy = policy(capacity_bytes)

    def store(self, keys: Iterable[bytes], group: int) -> list[bytes]:
        """Store new chunks of one KV cache group, and evict others to make room. Return the stored keys.

        As in an engine, the chunks are admitted from the last to the first, so that the last one is evicted
        first. Chunks that the tier holds already are skipped. Chunks that do not fit are dropped, the last
        ones first.

        Args:
            keys: different keys, in the order of the prompt.
            group: index of the group.
        """
        new = [key for key in keys if key not in self.held]
        if not new:
            return new
        size, counts = self.chunk_bytes[group], self.counts[group]
        self.make_room(size * len(new))
        fitting = min(len(new), (self.capacity_bytes - self.used_bytes) // size)
        counts.dropped += len(new) - fitting
        new = new[:fitting]
        self._policy.admit_all(new[::-1], size)
        self.held.update(dict.fromkeys(new, group))
        self.used_bytes += size * len(new)
        self._used[group] += size * len(new)
        counts.stored += len(new)
        counts.stored_bytes += size * len(new)
        counts.most_bytes = max(counts.most_bytes, self._used[group])
        return new

    def make_room(self, size: int) -> None:
        """Evict chunks until `size` bytes are free, or until nothing can be evicted."""
        while self.used_bytes + size > self.capacity_bytes:
            key = self._policy.evict()
            if key is None:
                return
            group = self.held.pop(key)
            freed, counts = self.chunk_bytes[group], self.counts[group]
            self.used_bytes -= freed
            self._used[group] -= freed
            counts.evicted += 1
            counts.evicted_bytes += freed

    def read(self, keys: Sequence[bytes], group: int) -> None:
        """Count reads of chunks of one KV cache group by a load, as uses of the chunks.

        Args:
            keys: keys of chunks that the tier holds.
            group: index of the group.
        """
        for key in keys:
            self._policy.touch(key)
        self.counts[group].read += len(keys)
        self.counts[group].read_bytes += len(keys) * self.chunk_bytes[group]

    def pin(self, keys: Iterable[bytes]) -> None:
        """Exclude chunks that the tier holds from eviction, until `unpin`."""
        for key in keys:
            self._policy.pin(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Allow the eviction of pinned chunks again."""
        for key in keys:
            self._policy.unpin(key)

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Rank chunks as the latest used, the first one as the very latest. Unknown keys are skipped."""
        self._policy.make_newest(keys[::-1])
