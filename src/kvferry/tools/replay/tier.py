"""A simulated tier: which chunks it holds, how many bytes they have, and what it evicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvferry.tiers.eviction import EvictionPolicy

# Capacity in bytes of a tier without a limit.
UNLIMITED = 1 << 62


@dataclass(slots=True)
class TierCounts:
    """The chunks that a simulated tier has stored, given to loads and evicted so far.

    Attributes:
        stored, read, evicted, dropped: numbers of chunks. A chunk is dropped if there is no room for it.
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
        return cls(*(sum(getattr(one, name) for one in each) for name in cls.__slots__))


class SimulatedTier:
    """The chunks of a tier. The eviction policy is the one that serves.

    The capacity is counted in bytes of chunks. A real host tier divides its memory into slabs of one chunk
    size each, so with chunks of several sizes it holds slightly less.

    Attributes:
        chunk_bytes: bytes of a chunk of each KV cache group, as the tier keeps it.
        capacity_bytes: maximum total bytes of all chunks; `UNLIMITED` for no limit.
        used_bytes: bytes of all chunks that the tier holds.
        held: KV cache group of each chunk that the tier holds, by key. Callers must not change it.
        counts: numbers of chunks of each KV cache group so far.
        policy: ranks the chunks in `held`. Callers may pin and rank chunks, but not add or evict any.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        chunk_bytes: Sequence[int],
        policy: Callable[[int], EvictionPolicy],
    ) -> None:
        self.name, self.chunk_bytes = name, tuple(chunk_bytes)
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.held: dict[bytes, int] = {}
        self.counts = [TierCounts() for _ in chunk_bytes]
        self.policy = policy(capacity_bytes)

    def make_room(self, size: int) -> int:
        """Evict chunks until `size` bytes are free, or none is left to evict. Return the free bytes."""
        if (missing := self.used_bytes + size - self.capacity_bytes) > 0:
            evicted = list(map(self.held.pop, self.policy.evict_bytes(missing)))
            for group in set(evicted):
                number, counts = evicted.count(group), self.counts[group]
                size_of_all = number * self.chunk_bytes[group]
                counts.evicted += number
                counts.evicted_bytes += size_of_all
                self.used_bytes -= size_of_all
        return self.capacity_bytes - self.used_bytes

    def fits_beside(self, size: int, keys: Iterable[Sequence[bytes]]) -> bool:
        """Return True if the tier has room for `size` bytes without the eviction of any of `keys`."""
        missing = self.used_bytes + size - self.capacity_bytes
        if missing <= 0:
            return True
        if size > self.capacity_bytes or (oldest := self.policy.oldest(missing)) is None:
            return False
        evicted = frozenset(oldest)
        return all(map(evicted.isdisjoint, keys))

    def store(
        self, runs: Iterable[tuple[int, Sequence[bytes]]], cold: Collection[bytes] = ()
    ) -> list[tuple[int, Sequence[bytes]]]:
        """Store new chunks, as host memory stores the chunks that one step of an engine computes.

        Those that do not fit are dropped.

        Args:
            runs: (index of the group, keys in the order of the prompt) of each run. Keys are different, and
                the tier does not hold them. An iterator sees the evictions so far.
            cold: keys of chunks that are evicted before all others.

        Returns:
            The runs without dropped chunks, each in the order in which its chunks were admitted.
        """
        stored: list[tuple[int, Sequence[bytes]]] = []
        # Room is made for all chunks before the first one is stored, so they do not evict each other.
        reserved = 0
        for group, keys in runs:
            size = self.chunk_bytes[group]
            free = self.make_room(reserved + size * len(keys)) - reserved
            fitting = min(len(keys), free // size)
            self.counts[group].dropped += len(keys) - fitting
            reserved += size * fitting
            # Admitted from the last to the first, so that the last one is evicted first.
            stored.append((group, keys[:fitting][::-1]))
        for group, keys in stored:
            self.admit(keys, group, cold)
        return stored

    def lacks(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of chunks that the tier does not hold, in the same order."""
        held = self.held
        return [key for key in keys if key not in held]

    def write(self, keys: Iterable[bytes], group: int, cold: Collection[bytes] = ()) -> list[bytes]:
        """Write new chunks of one group one after the other, as storage does. Return their keys.

        Args:
            keys: different keys, in the order in which they are written. Chunks that the tier holds are
                skipped.
            cold: keys of chunks that are evicted before all others.
        """
        new = self.lacks(keys)
        size = self.chunk_bytes[group]
        if any(key in cold for key in new):  # the next chunk may evict one of these
            for key in new:
                if self.make_room(size) >= size:
                    self.admit([key], group, cold)
        elif new and (fitting := self.make_room(size * len(new)) // size):
            self.admit(new[-fitting:], group)
        return new

    def admit(self, keys: Sequence[bytes], group: int, cold: Collection[bytes] = ()) -> None:
        """Add new chunks of one group, the last one as the newest. There must be room for them.

        Args:
            keys: different keys that the tier does not hold.
            cold: keys of chunks that are evicted before all others.
        """
        if not keys:
            return
        size, counts = self.chunk_bytes[group], self.counts[group]
        total = size * len(keys)
        if cold:
            self.policy.admit_all([key for key in keys if key in cold], size, cold=True)
            self.policy.admit_all([key for key in keys if key not in cold], size)
        else:
            self.policy.admit_all(keys, size)
        self.held.update(dict.fromkeys(keys, group))
        self.used_bytes += total
        counts.stored += len(keys)
        counts.stored_bytes += total
        counts.most_bytes = max(counts.most_bytes, counts.stored_bytes - counts.evicted_bytes)

    def count_reads(self, chunks: int, group: int) -> int:
        """Count reads of chunks of one group. Return their bytes."""
        size = chunks * self.chunk_bytes[group]
        self.counts[group].read += chunks
        self.counts[group].read_bytes += size
        return size
