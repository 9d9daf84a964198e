"""What a reading worker says to the worker it reads from: gather these cells for me.

    reader                                producer's worker
    Introduce(routes)           ─────▶    prepares the loops
    Gather(chunk, lease, cells) ─────▶    gathers into its outgoing area
                                ◀─────    Gathered(chunk, where, word) | NotGathered(chunk, reason)
    Done(chunk)                 ─────▶    may use that part of the area again

The reader reads the images, then the word of the part they lie in: a part that was given to somebody else
meanwhile has another word, as a lease has that ended (`transport.lease`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from kvferry.errors import ProtocolError
from kvferry.planning.nest import Nest
from kvferry.planning.pieces import Int64s
from kvferry.transport.messages import PROTOCOL

MAX_MESSAGE_BYTES = 32 << 20
MAX_NESTS = 1 << 14
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_HalfWord = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Stride = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class GatherRoute(msgspec.Struct, frozen=True, array_like=True):
    """How cells of one route become images.

    Attributes:
        src_stride, src_blocks: of the pool.
        image_stride: bytes from one image to the next.
        nests: per phase; addresses of block 0 to offsets in an image.
    """

    src_stride: _Stride
    src_blocks: _Count
    image_stride: _Stride
    nests: tuple[tuple[Nest, ...], ...]


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """What will be asked for."""

    protocol: int
    routes: list[GatherRoute]


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Asks for the images of some cells, under a lease.

    Attributes:
        chunk: names this request in answers.
        route: of those introduced.
        slot, generation: of the lease.
        blocks: int32 ids of the cells' source blocks, in order.
        phase: of the first cell; they follow one another.
    """

    chunk: _Count
    route: _Count
    slot: _Count
    generation: _HalfWord
    blocks: bytes
    phase: _Count

    def ids(self) -> Int64s:
        """`blocks` as an array."""
        return np.frombuffer(self.blocks, np.int32).astype(np.int64)


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The reader has read a chunk, or no longer wants it."""

    chunk: _Count


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """A chunk lies ready.

    Attributes:
        chunk: which.
        position: number of its first image in the area.
        word, generation: what must still be true when it has been read.
    """

    chunk: int
    position: _Count
    word: _Count
    generation: _HalfWord


class NotGathered(msgspec.Struct, frozen=True, tag="not-gathered"):
    """A chunk will not be; why."""

    chunk: int
    reason: str


Request: TypeAlias = Introduce | Gather | Done
Reply: TypeAlias = Gathered | NotGathered

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)


def encode(message: Request | Reply) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """A reader's message.

    Raises:
        ProtocolError: it is none, or is out of bounds.
    """
    try:
        message: Request = _requests.decode(data)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a gather request: {error}") from error
    if isinstance(message, Introduce):
        _check(message)
    if isinstance(message, Gather) and (not message.blocks or len(message.blocks) % 4):
        raise ProtocolError(f"{len(message.blocks)} bytes are no block ids")
    return message


def decode_reply(data: bytes) -> Reply:
    """A producer's answer.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message: Reply = _replies.decode(data)
    except _UNREADABLE as error:
        raise ProtocolError(f"not an answer to a gather request: {error}") from error
    return message


def _check(message: Introduce) -> None:
    if message.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {message.protocol} there, {PROTOCOL} here; use the same kvferry")
    nests = [nest for route in message.routes for phase in route.nests for nest in phase]
    if len(nests) > MAX_NESTS:
        raise ProtocolError(f"{len(nests)} nests, at most {MAX_NESTS}")
    if not all(route.nests and route.src_blocks for route in message.routes):
        raise ProtocolError("a route without phases or blocks")
    for route in message.routes:
        for nest in (nest for phase in route.nests for nest in phase):
            _check_nest(nest, route.image_stride)


def _check_nest(nest: Nest, stride: int) -> None:
    """An image must stay in its own room: what is past it belongs to another reader."""
    if nest.run < 1 or any(loop.count < 1 for loop in nest.loops):
        raise ProtocolError(f"a nest of runs of {nest.run} bytes in loops {nest.loops}")
    reach = [(loop.count - 1) * loop.dst for loop in nest.loops]
    low = nest.dst + sum(min(r, 0) for r in reach)
    high = nest.dst + sum(max(r, 0) for r in reach) + nest.run
    if low < 0 or high > stride:
        raise ProtocolError(f"a nest covers bytes [{low}, {high}) of images of {stride}")
