"""Follow the KV events that an engine publishes over ZMQ, without gaps.

vLLM numbers its batches of events from 0, and keeps the last ones for replay if it has a replay endpoint:

    replay of what there was ──→ batch n, n + 1 … ──→ gap, or silence ──→ replay of what is missing ──→ …

Without replay, or if it begins too late, all that is known of the engine is forgotten at a gap: an event that
was lost may have removed any block. The same happens when the numbers begin anew, because another run of the
engine publishes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from kvferry.common.limited_log import LimitedLog
from kvferry.tools.serving.router.block_index import BlockEvent, BlockIndex, HostBlocks

_log = logging.getLogger("kvferry.router")

_REPLAY_SECONDS = 2.0  # maximum time between two batches of a replay
_QUIET_MS = 2000
_MAX_BYTES = 64 << 20  # of a message
_END = (-1).to_bytes(8, "big", signed=True)  # number of the message that ends a replay


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    """A batch of vLLM's events. Its rank, which follows, is known."""

    seconds: float
    events: list[BlockEvent]


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[BlockEvent]:
    """Return the events of a batch. Raise msgspec.MsgspecError if they are not those of vLLM."""
    return _decoder.decode(payload).events


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where an engine publishes its events: ZMQ endpoints to connect to."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


class EventFollower:
    """Applies the events of one engine to an index.

    Attributes:
        gaps: number of times that events were lost.
    """

    def __init__(
        self, context: zmq.asyncio.Context, publisher: Publisher, index: BlockIndex, blocks: HostBlocks
    ) -> None:
        self.gaps = 0
        self._context, self._publisher, self._index, self._blocks = context, publisher, index, blocks
        self._next = 0  # number of the next batch
        self._complaints = LimitedLog(_log)

    async def run(self) -> None:
        """Follow the events until this coroutine is cancelled.

        Raises:
            zmq.ZMQError: an endpoint cannot be used.
        """
        with closing(self._socket(zmq.SUB)) as socket:
            await self._catch_up()
            socket.connect(self._publisher.endpoint)
            socket.subscribe(self._publisher.topic)
            while True:
                if await socket.poll(_QUIET_MS):
                    frames = await socket.recv_multipart()
                    await self._take_live(frames)
                else:
                    # Only a later event shows that one was lost, and an idle engine publishes none.
                    await self._catch_up()

    async def _catch_up(self, before: int = 1 << 63) -> None:
        """Take the batches up to number `before` that have not arrived, as far as the engine has them."""
        async for number, payload in self._replayed():
            if number < before:
                self._take(number, payload)

    async def _take_live(self, frames: list[bytes]) -> None:
        number = int.from_bytes(frames[-2], "big") if len(frames) == 3 else -1
        if number < 0:
            return
        if number < self._next:  # the engine has started anew
            self._index.clear(self._blocks)
            self._next = 0
        if number > self._next:
            await self._catch_up(number)
        self._take(number, frames[-1])

    def _take(self, number: int, payload: bytes) -> None:
        if number != self._next:
            self.gaps += self._next > 0
            self._index.clear(self._blocks)
        self._next = number + 1
        try:
            for event in decode_batch(payload):
                self._index.apply(self._blocks, event)
        except msgspec.MsgspecError as error:
            text = f"events of {self._publisher.endpoint} are not those of vLLM ({error}), and do not count"
            self._complaints.say(self._publisher.endpoint, text)

    async def _replayed(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the batches from the next one on that the engine still has, until it does not answer."""
        if self._publisher.replay is None:
            return
        with closing(self._socket(zmq.DEALER)) as socket:
            socket.connect(self._publisher.replay)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while await socket.poll(int(_REPLAY_SECONDS * 1000)):
                *_, number, payload = await socket.recv_multipart()
                if number == _END:
                    return
                yield int.from_bytes(number, "big"), payload

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger, socket.ipv6 = 0, True
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        return socket
