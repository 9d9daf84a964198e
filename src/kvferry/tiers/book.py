"""Who owns which bytes of an arena.

One process keeps the book and decides; ranks only get to know offsets, and report. A chunk takes one slot:

    FREE ─reserve→ FILLING ─every rank has written its units→ READY ─evict, no reader→ FREE
                      │                                          └─evict, readers→ EVICTED
                      └─a rank failed, cancel→ EVICTED ─last rank that holds it reports→ FREE

Only READY is found by its key, and only by `read`. A *hold* stands for ranks that may touch a slot: the one
of the store that fills it, one for each load that reads it. Each of its ranks reports once, and a slot is
free when nobody holds it; whatever became of the request, of the key, of the clock. Until then it is never
given out.

A slot's *generation* is the serial number of the store that it was given to last. A rank that reports a store
under an older generation has written where it had no business (it was given up as lost and was not): what
lies there now cannot be believed, whoever wrote it (`trespassed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count

from kvferry.tiers.shape import ChunkShape
from kvferry.tiers.slabs import Slabs


class State(Enum):
    """What a slot that is not free is for; see the module."""

    FILLING = auto()
    READY = auto()
    EVICTED = auto()


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a rank needs to touch a chunk, and to report that it did.

    Attributes:
        group: index of the shape.
        offset: bytes from the start of the arena to the chunk.
        serial: number of the hold; of a store, the generation of its slot.
    """

    group: int
    offset: int
    serial: int


@dataclass(slots=True)
class Chunk:
    """A slot that is not free.

    Attributes:
        key: names its content; while FILLING, what it will be.
        group, offset: as of `Ticket`.
        generation: serial number of its store.
        state: see the module.
        digests: of all units, one after another; those of units not yet written are zero.
        unwritten: units that no rank has written.
        holds: how many holds stand.
    """

    key: bytes
    group: int
    offset: int
    generation: int
    state: State
    digests: bytearray
    unwritten: int
    holds: int


@dataclass(slots=True)
class _Hold:
    chunk: Chunk
    owing: int
    written: bytearray | None


class ArenaBook:
    """The owner's account of an arena; pure bookkeeping, touches no memory. Not thread-safe.

    Attributes:
        shapes: of every group's chunks.
        ranks: how many report on every hold.
        digest_bytes: of one unit.
        slabs: the slots.
    """

    def __init__(
        self, capacity_bytes: int, shapes: Sequence[ChunkShape], ranks: int, digest_bytes: int = 16
    ) -> None:
        """All free.

        Args:
            capacity_bytes: of the arena.
            shapes: of every group's chunks.
            ranks: processes that fill and read, numbered from 0.
            digest_bytes: of one unit.

        Raises:
            ConfigError: the arena is too small for chunks of these shapes.
        """
        self.shapes = tuple(shapes)
        self.ranks = ranks
        self.digest_bytes = digest_bytes
        self.slabs = Slabs(capacity_bytes, [shape.stride for shape in shapes])
        self._ready: dict[bytes, Chunk] = {}
        self._filling: dict[bytes, Chunk] = {}
        self._slots: dict[int, Chunk] = {}
        self._holds: dict[int, _Hold] = {}
        self._serials = count(1)

    @property
    def ready(self) -> dict[bytes, Chunk]:
        """Chunks that can be read, by key. To look at, not to change."""
        return self._ready

    @property
    def filling(self) -> dict[bytes, Chunk]:
        """Chunks that are being stored, by key. To look at, not to change."""
        return self._filling

    @property
    def held(self) -> int:
        """Holds that stand."""
        return len(self._holds)

    def stride(self, group: int) -> int:
        """Bytes that a chunk of the group takes."""
        return self.shapes[group].stride

    def reserve(self, key: bytes, group: int) -> Ticket | None:
        """FREE to FILLING, held by the store; None if no slot is free.

        Raises:
            KeyError: the key is here, or is being stored.
        """
        if key in self._ready or key in self._filling:
            raise KeyError(f"chunk {key.hex()} is here already")
        offset = self.slabs.take(self.stride(group))
        if offset is None:
            return None
        serial, shape = next(self._serials), self.shapes[group]
        digests = bytearray(shape.total_units * self.digest_bytes)
        chunk = Chunk(key, group, offset, serial, State.FILLING, digests, shape.total_units, 0)
        self._filling[key] = self._slots[offset] = chunk
        return self._hold(chunk, serial, bytearray(shape.total_units))

    def owes(self, ticket: Ticket, rank: int) -> bool:
        """Whether this rank has still to report on this hold."""
        hold = self._holds.get(ticket.serial)
        return hold is not None and bool(hold.owing >> rank & 1)

    def wrote(self, ticket: Ticket, rank: int, runs: Sequence[tuple[int, bytes]]) -> Chunk | None:
        """A rank has written its units; with the last rank, FILLING to READY.

        Units that do not exist, that another rank has written, or digests cut off spoil the chunk, as
        `failed` does; so does a unit that no rank has written.

        Args:
            ticket: of the store.
            rank: one that owes a report.
            runs: first unit, and digests of it and the units after it.

        Returns:
            The chunk, if it is READY now.
        """
        hold = self._holds[ticket.serial]
        chunk = hold.chunk
        if not all(self._write(hold, first, digests) for first, digests in runs):
            self._spoil(chunk)
        return self._report(ticket, rank)

    def failed(self, ticket: Ticket, rank: int) -> None:
        """A rank has not written its units and will not: FILLING to EVICTED."""
        self._spoil(self._holds[ticket.serial].chunk)
        self._report(ticket, rank)

    def cancel(self, ticket: Ticket) -> None:
        """The store is not wanted any more: FILLING to EVICTED; its ranks still report."""
        hold = self._holds.get(ticket.serial)
        if hold is not None and hold.written is not None:
            self._spoil(hold.chunk)

    def read(self, key: bytes) -> Ticket:
        """Hold a READY chunk for a load, by all ranks. Raises KeyError if there is none of this key."""
        return self._hold(self._ready[key], next(self._serials), None)

    def done(self, ticket: Ticket, rank: int) -> None:
        """A rank has read, and will no more."""
        self._report(ticket, rank)

    def chunk(self, ticket: Ticket) -> Chunk:
        """What a hold that stands is on."""
        return self._holds[ticket.serial].chunk

    def evict(self, key: bytes) -> None:
        """READY to FREE, or to EVICTED while it is read. Raises KeyError if it is not READY."""
        chunk = self._ready.pop(key)
        chunk.state = State.EVICTED
        self._free_if_unheld(chunk)

    def crowding(self, group: int) -> list[bytes]:
        """Keys to evict so that a whole slab of another size is free for this group; empty if there is none.

        A slab is offered when free slots of its size come to a slab, and nobody holds anything in it.
        """
        for slab in self.slabs.crowding(self.stride(group)):
            chunks = [self._slots[at] for at in self.slabs.slots(slab) if at in self._slots]
            if not any(chunk.holds for chunk in chunks):
                return [chunk.key for chunk in chunks]
        return []

    def owed_by(self, rank: int) -> list[tuple[Ticket, bool]]:
        """Holds that a rank has not reported on, and whether each is a store's."""
        return [
            (Ticket(hold.chunk.group, hold.chunk.offset, serial), hold.written is not None)
            for serial, hold in self._holds.items()
            if hold.owing >> rank & 1
        ]

    def trespassed(self, ticket: Ticket) -> list[Chunk]:
        """Chunks in the bytes of a store's ticket that are of a later generation; slabs change sizes."""
        first = ticket.offset
        last = first + self.stride(ticket.group)
        return [
            chunk
            for at in self.slabs.slots(first // self.slabs.slab_bytes)
            if (chunk := self._slots.get(at)) is not None
            and at < last
            and first < at + self.stride(chunk.group)
            and chunk.generation > ticket.serial
        ]

    def spoil(self, chunk: Chunk) -> None:
        """FILLING or READY to EVICTED, or FREE: its bytes cannot be believed."""
        if chunk.state is State.READY:
            self.evict(chunk.key)
        else:
            self._spoil(chunk)

    def check_integrity(self) -> None:
        """Compare the books with themselves; changes nothing, takes time with the number of chunks.

        Raises:
            AssertionError: they contradict each other; the message says where.
        """
        self.slabs.check_integrity()
        if sum(self.stride(chunk.group) for chunk in self._slots.values()) != self.slabs.used_bytes:
            raise AssertionError("slots are taken that no chunk is in")
        end = 0
        holds = dict.fromkeys(self._slots, 0)
        for hold in self._holds.values():
            if self._slots.get(hold.chunk.offset) is not hold.chunk or not hold.owing:
                raise AssertionError(f"a hold on {hold.chunk} that is free, or that no rank owes")
            holds[hold.chunk.offset] += 1
        for offset, chunk in sorted(self._slots.items()):
            if offset != chunk.offset or offset < end or chunk.holds != holds[offset]:
                raise AssertionError(
                    f"{chunk} at {offset}, after bytes until {end}, held {holds[offset]} times"
                )
            end = offset + self.stride(chunk.group)
            where = {State.FILLING: self._filling, State.READY: self._ready}.get(chunk.state)
            if (where is None or chunk.state is State.FILLING) and not chunk.holds:
                raise AssertionError(f"{chunk} is held by nobody")
            if where is not None and where.get(chunk.key) is not chunk:
                raise AssertionError(f"{chunk} is not found by its key")
            if chunk.state is State.READY and chunk.unwritten:
                raise AssertionError(f"{chunk} has units that nobody wrote")
        if (
            len(self._ready) + len(self._filling) > len(self._slots)
            or self._ready.keys() & self._filling.keys()
        ):
            raise AssertionError("keys of chunks that are in no slot, or in two states")

    def _hold(self, chunk: Chunk, serial: int, written: bytearray | None) -> Ticket:
        self._holds[serial] = _Hold(chunk, (1 << self.ranks) - 1, written)
        chunk.holds += 1
        return Ticket(chunk.group, chunk.offset, serial)

    def _write(self, hold: _Hold, first: int, digests: bytes) -> bool:
        """Note digests; False if they are not of units that were still to be written."""
        units, cut_off = divmod(len(digests), self.digest_bytes)
        written = hold.written
        if written is None or cut_off or not 0 <= first <= len(written) - units:
            return False
        if any(written[first : first + units]):
            return False
        written[first : first + units] = b"\1" * units
        at = first * self.digest_bytes
        hold.chunk.digests[at : at + len(digests)] = digests
        hold.chunk.unwritten -= units
        return True

    def _report(self, ticket: Ticket, rank: int) -> Chunk | None:
        """One rank less; with the last one the hold ends. Returns the chunk if that made it READY."""
        hold = self._holds[ticket.serial]
        if not hold.owing >> rank & 1:
            raise KeyError(f"rank {rank} has reported on hold {ticket.serial} already")
        hold.owing &= ~(1 << rank)
        if hold.owing:
            return None
        chunk = hold.chunk
        del self._holds[ticket.serial]
        chunk.holds -= 1
        if chunk.state is State.FILLING and chunk.unwritten:
            self._spoil(chunk)
        elif chunk.state is State.FILLING:
            chunk.state = State.READY
            self._ready[chunk.key] = self._filling.pop(chunk.key)
            return chunk
        self._free_if_unheld(chunk)
        return None

    def _spoil(self, chunk: Chunk) -> None:
        if chunk.state is State.FILLING:
            chunk.state = State.EVICTED
            del self._filling[chunk.key]

    def _free_if_unheld(self, chunk: Chunk) -> None:
        if chunk.state is State.EVICTED and not chunk.holds:
            del self._slots[chunk.offset]
            self.slabs.give(chunk.offset)
