"""The reader's end of the gather channel: one ZeroMQ DEALER socket for each rank of a peer.

A lane owns the client and polls it. No method blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import zmq

from kvferry.common.errors import ProtocolError
from kvferry.memory.image_digest import DIGEST_BYTES
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Int64s
from kvferry.planning.packed_image import ALIGNMENT
from kvferry.planning.strided_copy import StridedCopy
from kvferry.transport.addresses import zmq_endpoint
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PROTOCOL, as_protocol_error, encode
from kvferry.transport.redeem import Count, HalfWord
from kvferry.transport.security import Keys
from kvferry.transport.sockets import new_dealer

MAX_REQUEST_BYTES = 16 << 20
MAX_REPLY_BYTES = 64 << 10
MAX_ROUTES = 1024
MAX_STRIDED_COPIES = 1 << 14
MAX_LOOPS = 32
MAX_CELLS = 1 << 20
# Maximum bytes that one request may have digested, because other readers wait meanwhile.
MAX_DIGEST_BYTES = 1 << 30
_MOST_BYTES = 1 << 40
_NAMED = 8  # number of offsets that an error names
# Maximum number of messages queued for a rank that does not read them; sending more fails.
_QUEUED = 10_000

_Stride = Annotated[int, msgspec.Meta(ge=1, lt=_MOST_BYTES)]


class GatherRoute(msgspec.Struct, frozen=True, array_like=True):
    """How the source must pack the cells of one route into images.

    In each part, `nests` copy the cell at offset 0, and `at` has the offset of each cell in its block, which
    is added to the source addresses.
    """

    src_stride: _Stride  # bytes from one block of the source's KV cache to the next
    src_blocks: Count
    image_stride: _Stride  # bytes from one image to the next
    parts: tuple[PoolCopies, ...]

    @property
    def cells(self) -> int:
        return len(self.parts[0].at)


class AnnounceRoutes(msgspec.Struct, frozen=True, tag="introduce"):
    """Message without reply: replaces the routes to which the reader's `Gather` messages refer by index."""

    protocol: Count
    routes: list[GatherRoute]


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Request to pack cells of a route into staging memory, or for their digest."""

    segment: Count = msgspec.field(name="chunk")  # id of the request, repeated in the reply
    route: Count  # index in `AnnounceRoutes.routes`
    slot: Count  # word of the lease on the blocks
    generation: HalfWord  # low half of the word while the lease is valid
    # int32 per cell, native byte order: its block, and its index within the block
    blocks: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_CELLS)]
    cells: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_CELLS)]
    shared: bool = False  # pack into the memory file that the reader has mapped
    digest: bool = False  # pack nothing, and compute `StagingCopies.digest`

    def places(self) -> tuple[Int64s, Int64s]:
        """Return the block of each cell, and its index within the block, int64 of shape (n,)."""
        blocks, cells = (np.frombuffer(ids, np.int32).astype(np.int64) for ids in (self.blocks, self.cells))
        return blocks, cells


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Message without reply: the reader no longer needs a segment."""

    segment: Count = msgspec.field(name="chunk")


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """Reply: the cells of a segment have been packed into images from index `position` of the area on.

    `word` is the index of the word that changes before the images are overwritten, `generation` its low half.
    """

    segment: Count = msgspec.field(name="chunk")
    position: Count
    word: Count
    generation: HalfWord


class Digested(msgspec.Struct, frozen=True, tag="digested"):
    """Reply: the digest of the cells of a segment."""

    segment: Count = msgspec.field(name="chunk")
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class NotGathered(msgspec.Struct, frozen=True, tag="not-gathered"):
    """Reply: the cells will not be packed or digested.

    If `unknown`, the reader must announce its routes again.
    """

    segment: Count = msgspec.field(name="chunk")
    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    unknown: bool = False


Request: TypeAlias = AnnounceRoutes | Gather | Done
Reply: TypeAlias = Gathered | Digested | NotGathered

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request:
    """Decode a reader's message. Raise ProtocolError if that fails, or a value is out of bounds."""
    with as_protocol_error("a gather request"):
        message: Request = _requests.decode(data)
    if isinstance(message, AnnounceRoutes):
        _check(message)
    elif isinstance(message, Gather):
        size = len(message.blocks)
        if not size or size % 4 or len(message.cells) != size:
            raise ProtocolError(
                f"{size} bytes of block ids and {len(message.cells)} of cells; expected 4 bytes for each of "
                "one or more cells"
            )
    return message


def decode_reply(data: bytes) -> Reply:
    """Decode a server's reply. Raise ProtocolError if that fails."""
    with as_protocol_error("an answer to a gather request"):
        message: Reply = _replies.decode(data)
    return message


def _check(message: AnnounceRoutes) -> None:
    if message.protocol != PROTOCOL:
        raise ProtocolError(
            f"protocol {message.protocol} there, {PROTOCOL} here; run the same release of kvferry on both"
        )
    parts = [part for route in message.routes for part in route.parts]
    if len(message.routes) > MAX_ROUTES:
        raise ProtocolError(f"{len(message.routes)} routes, at most {MAX_ROUTES}")
    most = max(len(parts), sum(len(part.nests) for part in parts))
    if most > MAX_STRIDED_COPIES:
        raise ProtocolError(f"{most} planes or strided copies, at most {MAX_STRIDED_COPIES}")
    if (cells := sum(len(part.at) for part in parts)) > MAX_CELLS:
        raise ProtocolError(f"offsets of {cells} cells, at most {MAX_CELLS}")
    for route in message.routes:
        _check_route(route)


def _check_route(route: GatherRoute) -> None:
    stride = route.image_stride
    if not (route.parts and route.src_blocks) or stride % ALIGNMENT:
        raise ProtocolError(
            f"a route of {len(route.parts)} planes and {route.src_blocks} blocks, packed cells every "
            f"{stride} bytes; expected one or more of each, and cells at multiples of {ALIGNMENT} bytes"
        )
    for part in route.parts:
        # Whether a copy reads inside the pool is checked where the pool is known, in `AddressSpace`.
        if not part.at or len(part.at) != route.cells or min(part.at) < 0 or max(part.at) >= _MOST_BYTES:
            raise ProtocolError(
                f"offsets of {len(part.at)} cells, which begin with {list(part.at[:_NAMED])}; "
                f"expected {route.cells} offsets, all inside the block"
            )
        for copy in part.nests:
            _check_copy(copy, stride)
    # This limit also bounds the work: loops cannot repeat the same bytes for hours.
    if (size := sum(copy.bytes for part in route.parts for copy in part.nests)) > stride:
        raise ProtocolError(
            f"copies of {size} bytes into a packed cell of {stride}; expected no more than it has"
        )


def _check_copy(copy: StridedCopy, stride: int) -> None:
    """Check that a copy writes only inside its image: the memory after it may be another reader's."""
    regular = all(loop.count > 1 and loop.src >= 0 and loop.dst >= 0 for loop in copy.loops)
    if copy.run < 1 or len(copy.loops) > MAX_LOOPS or not regular:
        raise ProtocolError(
            f"a strided copy of runs of {copy.run} bytes in loops {copy.loops[: MAX_LOOPS + 1]}; expected "
            f"runs of 1 byte or more in at most {MAX_LOOPS} loops, each with 2 rounds or more and no "
            "negative stride"
        )
    high = copy.dst + sum((loop.count - 1) * loop.dst for loop in copy.loops) + copy.run
    if copy.dst < 0 or high > stride:
        raise ProtocolError(
            f"a strided copy writes bytes [{copy.dst}, {high}) of a packed cell; expected them in "
            f"[0, {stride})"
        )


class GatherClient:
    """A connection to one rank of a peer, over which a lane asks the rank to gather.

    Attributes:
        silent_until: time, by the lane's clock, until which the lane sends no requests. The lane sets it when
            a request has timed out. Any reply of the rank resets it to 0.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        host: str,
        port: int,
        routes: Sequence[GatherRoute],
        keys: Keys,
    ) -> None:
        """Connect to the rank at an IP address in the background, and announce the routes."""
        self.silent_until = 0.0
        self.socket = new_dealer(context, keys, MAX_REPLY_BYTES)
        self.socket.sndhwm = _QUEUED
        self.socket.connect(zmq_endpoint(self.socket, host, port))
        self._introduction = AnnounceRoutes(PROTOCOL, list(routes))
        self._introductions = 1
        self._send(self._introduction)
        self._numbers = itertools.count(1)
        self._wanted: dict[int, int] = {}  # segment to number of announcements when it was requested
        self._answers: dict[int, Reply] = {}

    def is_silent(self, now: float) -> bool:
        self._receive()  # a reply that has arrived ends the silence
        return now < self.silent_until

    def ask(
        self,
        route: int,
        lease: LeaseWord,
        blocks: Int64s,
        cells: Int64s,
        *,
        shared: bool = False,
        digest: bool = False,
    ) -> int:
        """Send a `Gather` of cells in these blocks, int64 of shape (n,), and return the id of its segment."""
        segment = next(self._numbers) % (1 << 31)  # the message has room for 31 bits
        ids, places = (each.astype(np.int32).tobytes() for each in (blocks, cells))
        self._wanted[segment] = self._introductions
        # The queue may be full: the rank has not read for long.
        if not self._send(Gather(segment, route, lease.slot, lease.generation, ids, places, shared, digest)):
            self._answers[segment] = NotGathered(segment, "the producer's worker does not take requests")
        return segment

    def answer(self, segment: int) -> Reply | None:
        """Return the reply to a request and close the request; None if no reply has arrived yet."""
        self._receive()
        found = self._answers.pop(segment, None)
        if found is not None:
            del self._wanted[segment]
        return found

    def done(self, segment: int) -> None:
        """Tell the rank to free a segment's staging memory. Later replies about it are ignored."""
        self._wanted.pop(segment, None)
        self._answers.pop(segment, None)
        self._send(Done(segment))

    def close(self) -> None:
        self.socket.close()

    def _receive(self) -> None:
        while self.socket.poll(0):
            try:
                reply = decode_reply(self.socket.recv())
            except ProtocolError:
                continue
            self.silent_until = 0.0
            if reply.segment not in self._wanted:
                continue
            self._answers[reply.segment] = reply
            # The rank has forgotten our routes: the connection broke, or it has too many readers. Announce
            # them again, but only once for several such replies.
            unknown = isinstance(reply, NotGathered) and reply.unknown
            if unknown and self._wanted[reply.segment] == self._introductions:
                self._introductions += 1
                self._send(self._introduction)

    def _send(self, message: Request) -> bool:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
