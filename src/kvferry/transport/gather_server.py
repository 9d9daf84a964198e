"""The producer's end of the gather channel: pack or digest cells when readers ask for it.

Each worker has one such server: one thread, one ROUTER socket, one staging area that readers read from, and
one that readers of the same machine map.

    asked ─room─▶ gathered ─Done─▶ free
      └─no room─▶ waiting ─room─▶ ...          gathered ─silent for too long─▶ word raised ─▶ free

Each allocation has a word. The reply names it, and the server raises it before it gives the memory to another
reader. So a late reader detects that its data may be overwritten. The server never calls NIXL, because the
area is already registered.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.geometry import RankGeometry
from kvferry.memory.address_space import AddressSpace
from kvferry.memory.copies import StagedImages, StagingCopies
from kvferry.memory.device_stream import enter_stream
from kvferry.transport.costs import TransferSettings
from kvferry.transport.gather_client import (
    MAX_DIGEST_BYTES,
    MAX_REQUEST_BYTES,
    AnnounceRoutes,
    Digested,
    Done,
    Gather,
    Gathered,
    GatherRoute,
    NotGathered,
    Reply,
    decode_request,
)
from kvferry.transport.lease import LeaseWords
from kvferry.transport.listener import Listener
from kvferry.transport.messages import encode
from kvferry.transport.staging import UNIT_BYTES, Allocation, StagingArea

logger = logging.getLogger(__name__)

# Seconds after which packed cells are freed if the reader has not released them.
ALLOCATION_SECONDS = 60.0

# Maximum seconds that a request waits for staging memory. The timeout of readers is about the same.
WAIT_SECONDS = 5.0

_SWEEP_SECONDS = 1.0

# Limits of the state that readers can make a server keep: number of readers, and of cell offsets in all their
# routes, beyond which the oldest reader is forgotten; number of waiting requests in all, and of one reader;
# bytes of block ids of all waiting requests, and as many of cells.
MAX_READERS = 1024
MAX_READERS_CELLS = 1 << 22
MAX_WAITING = 4096
MAX_WAITING_OF_READER = 1024
MAX_WAITING_BYTES = 64 << 20


@dataclass(slots=True)
class _Reader:
    """A peer's worker that has announced routes, with the copies that pack them and its segments' memory."""

    routes: list[tuple[GatherRoute, StagingCopies]]
    cells: int
    allocations: dict[int, _HeldAllocation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _HeldAllocation:
    """Staging memory of a segment that was packed at the time `since`. Its word protects it."""

    area: StagingArea
    allocation: Allocation
    word: int
    since: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for staging memory since a time. `sender` is ZeroMQ's id of the reader."""

    sender: bytes
    message: Gather
    since: float


class GatherServer:
    """A thread that packs cells into staging memory, `area`, at the request of readers.

    Each unit has a word, and that of an allocation's first unit changes before the memory is used again.
    """

    def __init__(
        self,
        geometry: RankGeometry,
        area: StagingArea,
        words: LeaseWords,
        first_word: int,
        settings: TransferSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        make_copies: Callable[..., StagingCopies] = StagingCopies,
        shared: StagingArea | None = None,
    ) -> None:
        """Bind a socket to a free port, and start the thread.

        Args:
            words: words of the worker. Those before index `first_word` protect leased blocks. The others
                protect the units of `area`, and then those of `shared`.
            shared: staging area in host memory that readers of the same machine map.
        """
        self.area, self._shared = area, shared
        self._make_copies = make_copies
        self._words, self._first_word, self._clock = words, first_word, clock
        self._blocks = geometry.num_blocks
        self._pool = AddressSpace(geometry.regions)
        self._readers: OrderedDict[bytes, _Reader] = OrderedDict()
        self._waiting: deque[_Waiting] = deque()
        self._swept = clock()
        host, port, keys, peers = settings.host, settings.ports or 0, settings.keys, settings.peers
        self._listener = Listener("gather channel", host, port, keys, MAX_REQUEST_BYTES, peers=peers)
        self.port = self._listener.port
        self._log = LimitedLog(logger)
        self._listener.serve(
            "kvferry-gather",
            self._serve,
            begin=(partial(enter_stream, area.region),),
            each_round=(self._expire, self._serve_waiting),
        )

    def close(self, patience_seconds: float = 2.0) -> None:
        self._listener.close(patience_seconds)

    # -- the thread ---------------------------------------------------------------------------------------

    def _serve(self, sender: bytes, data: bytes) -> None:
        message = decode_request(data)
        if isinstance(message, AnnounceRoutes):
            self._set_routes(sender, message)
        elif isinstance(message, Done):
            reader, segment = self._readers.get(sender), message.segment
            if reader is not None and (held := reader.allocations.pop(segment, None)):
                self._free(held)
            self._waiting = deque(
                one for one in self._waiting if one.sender != sender or one.message.segment != segment
            )
        elif message.digest:
            self._digest(sender, message)
        else:
            self._ask(sender, message)

    def _set_routes(self, sender: bytes, message: AnnounceRoutes) -> None:
        routes = [
            (route, self._make_copies(route.parts, self._pool, "src", route.src_stride, route.src_blocks))
            for route in message.routes
        ]
        if known := self._readers.pop(sender, None):
            self._free_all(known)
        cells = sum(len(part.at) for route in message.routes for part in route.parts)
        self._readers[sender] = _Reader(routes, cells)
        # The reader that has just come is kept, however many cells it has.
        while len(self._readers) > 1 and (
            len(self._readers) > MAX_READERS
            or sum(reader.cells for reader in self._readers.values()) > MAX_READERS_CELLS
        ):
            _, oldest = self._readers.popitem(last=False)
            self._free_all(oldest)

    def _ask(self, sender: bytes, message: Gather) -> None:
        if self._is_full(sender, message):
            self._refuse(sender, message, f"{len(self._waiting)} requests are waiting already")
        # Behind those that wait, or a large request would never find room.
        elif self._waiting or not self._gather(sender, message):
            self._waiting.append(_Waiting(sender, message, self._clock()))

    def _is_full(self, sender: bytes, message: Gather) -> bool:
        if not self._waiting:  # so that a single large request is not refused
            return False
        of_reader = sum(one.sender == sender for one in self._waiting)
        size = sum(len(one.message.blocks) for one in self._waiting) + len(message.blocks)
        return (
            len(self._waiting) >= MAX_WAITING
            or of_reader >= MAX_WAITING_OF_READER
            or size > MAX_WAITING_BYTES
        )

    def _serve_waiting(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()  # removed first, so a request that raises is not retried
            if not self._gather(first.sender, first.message):
                self._waiting.appendleft(first)
                return

    def _gather(self, sender: bytes, message: Gather) -> bool:
        """Pack the cells of a request or refuse it, and reply. Return False if there is no room now."""
        reader = self._readers.get(sender)
        if reader is None:
            return self._refuse_unknown(sender, message)
        if reason := self._refusal(reader, message) or self._no_gathering(reader, message):
            return self._refuse(sender, message, reason)
        route, copies = reader.routes[message.route]
        area = self._area(message)
        allocation = area.allocate(len(message.places()[0]), route.image_stride)
        if allocation is None:
            return False
        reason = self._copy(message, area.images(route.image_stride), copies, allocation)
        # Check the lease again after the copy: the data is valid only if no block has been freed by now.
        if reason := reason or self._ended(message):
            area.free(allocation)
            return self._refuse(sender, message, reason)
        word = self._first_word + allocation.unit + (self.area.units if message.shared else 0)
        reader.allocations[message.segment] = _HeldAllocation(area, allocation, word, self._clock())
        generation = int(self._words.array[word]) & 0xFFFFFFFF
        self._answer(sender, Gathered(message.segment, allocation.position, word, generation))
        return True

    def _digest(self, sender: bytes, message: Gather) -> None:
        """Reply with the digest of cells, or refuse it."""
        if (reader := self._readers.get(sender)) is None:
            self._refuse_unknown(sender, message)
            return
        if reason := self._refusal(reader, message) or self._no_digest(reader, message):
            self._refuse(sender, message, reason)
            return
        route, copies = reader.routes[message.route]
        try:
            digest = copies.digest(*message.places(), route.image_stride)
        except Exception as error:  # noqa: BLE001 - logged in full
            self._log.say("digest", "gather channel: a digest failed", error)
            self._refuse(sender, message, f"the digest failed: {shown(str(error), 500)}")
            return
        # As after a copy: the digest is that of the leased blocks only if none has been freed by now.
        if reason := self._ended(message):
            self._refuse(sender, message, reason)
            return
        self._answer(sender, Digested(message.segment, digest))

    def _area(self, message: Gather) -> StagingArea:
        return self._shared if message.shared and self._shared is not None else self.area

    def _copy(
        self, message: Gather, images: StagedImages, copies: StagingCopies, allocation: Allocation
    ) -> str | None:
        try:
            copies.gather(*message.places(), images, allocation.position)
        except Exception as error:  # noqa: BLE001 - logged in full
            self._log.say("copy", "gather channel: a copy failed", error)
            return f"the copy failed: {shown(str(error), 500)}"
        return None

    def _refusal(self, reader: _Reader, message: Gather) -> str | None:
        if message.route >= len(reader.routes):
            return f"there is no route {message.route}"
        (route, _), (blocks, cells) = reader.routes[message.route], message.places()
        if cells.min() < 0 or cells.max() >= route.cells:
            return f"cells {cells.min()} to {cells.max()} of {route.cells}"
        if blocks.min() < 1 or blocks.max() >= min(self._blocks, route.src_blocks):
            return f"blocks {blocks.min()} to {blocks.max()} are not in the pool"
        return self._ended(message)

    def _no_gathering(self, reader: _Reader, message: Gather) -> str | None:
        (route, _), images = reader.routes[message.route], len(message.places()[0])
        if message.segment in reader.allocations:
            return "a chunk of that name is held"
        if message.shared and self._shared is None:
            return "this worker has no memory that others can map"
        if (images + 1) * route.image_stride > self._area(message).units * UNIT_BYTES:
            return "the images of one request have no room in the staging area"
        return None

    def _no_digest(self, reader: _Reader, message: Gather) -> str | None:
        (route, _), cells = reader.routes[message.route], len(message.places()[0])
        if (size := cells * route.image_stride) > MAX_DIGEST_BYTES:
            return f"{size} bytes to digest, at most {MAX_DIGEST_BYTES} per request"
        return None

    def _ended(self, message: Gather) -> str | None:
        word = self._words.incarnation << 32 | message.generation
        holds = message.slot < self._first_word and int(self._words.array[message.slot]) == word
        return None if holds else "the lease has ended"

    def _refuse_unknown(self, sender: bytes, message: Gather) -> bool:
        return self._refuse(sender, message, "the reader has not introduced itself", unknown=True)

    def _refuse(self, sender: bytes, message: Gather, reason: str, *, unknown: bool = False) -> bool:
        self._answer(sender, NotGathered(message.segment, reason, unknown))
        return True

    def _answer(self, sender: bytes, reply: Reply) -> None:
        self._listener.send(sender, encode(reply))

    def _expire(self) -> None:
        """Free images that readers did not release in time. Refuse requests that have waited too long."""
        now = self._clock()
        if now - self._swept < _SWEEP_SECONDS:  # called after each message
            return
        self._swept = now
        for reader in self._readers.values():
            for segment, held in list(reader.allocations.items()):
                if now - held.since > ALLOCATION_SECONDS:
                    self._free(reader.allocations.pop(segment))
        while self._waiting and now - self._waiting[0].since > WAIT_SECONDS:
            late = self._waiting.popleft()
            self._refuse(late.sender, late.message, f"no room in the staging area for {WAIT_SECONDS:g} s")

    def _free_all(self, reader: _Reader) -> None:
        for held in reader.allocations.values():
            self._free(held)

    def _free(self, held: _HeldAllocation) -> None:
        # The word is raised first: a reader that is too late must not find it unchanged.
        self._words.end([held.word])
        held.area.free(held.allocation)
