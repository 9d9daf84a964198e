"""The reader's end of the gather channel: one ZeroMQ DEALER socket for each rank of a peer.

A lane owns the client and polls it. No method blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from kvferry.errors import ProtocolError
from kvferry.planning.descriptors import Int64s
from kvferry.transport import security
from kvferry.transport.address import zmq_endpoint
from kvferry.transport.gather_messages import (
    MAX_REPLY_BYTES,
    AnnounceRoutes,
    Done,
    Gather,
    Gathered,
    GatherRoute,
    NotGathered,
    decode_reply,
    encode,
)
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PROTOCOL

# Maximum number of messages queued for a rank that does not read them; sending more fails.
_QUEUED = 10_000


class GatherClient:
    """A connection to one rank of a peer, over which a lane asks the rank to gather.

    Attributes:
        socket: underlying ZeroMQ socket, for use in a poller.
        silent_until: time until which the lane sends no requests, by the lane's clock. The lane sets it when
            a request has timed out. Any reply of the rank resets it to 0.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        host: str,
        port: int,
        routes: Sequence[GatherRoute],
        keys: security.Keys,
    ) -> None:
        """Connect to the rank in the background, and announce the routes.

        Args:
            host: IP address of the rank's gather channel.
            routes: `ask` takes an index into this sequence.
        """
        self.silent_until = 0.0
        self.socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_REPLY_BYTES
        self.socket.sndhwm = _QUEUED
        security.secure_client(self.socket, keys)
        self.socket.connect(zmq_endpoint(self.socket, host, port))
        self._introduction = AnnounceRoutes(PROTOCOL, list(routes))
        self._introductions = 0
        self._announce_routes()
        self._numbers = itertools.count(1)
        self._wanted: dict[int, int] = {}  # segment to number of announcements when it was requested
        self._answers: dict[int, Gathered | NotGathered] = {}

    @property
    def waiting(self) -> bool:
        """True while a request has neither been answered by `answer` nor given up by `done`."""
        return bool(self._wanted)

    def is_silent(self, now: float) -> bool:
        """Return whether the lane must send no requests at this time of its clock."""
        self._receive()  # a reply that has arrived ends the silence
        return now < self.silent_until

    def ask(self, route: int, lease: LeaseWord, blocks: Int64s, cell: int, *, shared: bool = False) -> int:
        """Ask the rank to pack cells, and return the id of the segment, for `answer` and `done`.

        Args:
            route: index in the constructor's argument `routes`.
            lease: word of the lease on the source blocks.
            blocks: source block of each cell, int64 of shape (n,). The cells are consecutive in the order of
                tokens.
            cell: index of the first cell within its block.
            shared: True to pack the cells into the rank's memory file, which this worker has mapped.
        """
        segment = next(self._numbers) % (1 << 31)  # the message has room for 31 bits
        self._wanted[segment] = self._introductions
        ids = blocks.astype(np.int32).tobytes()
        request = Gather(
            segment=segment,
            route=route,
            slot=lease.slot,
            generation=lease.generation,
            blocks=ids,
            cell=cell,
            shared=shared,
        )
        # The queue is full: the rank has not read for long, and the cells go another way.
        if not self._send(request):
            self._answers[segment] = NotGathered(segment, "the producer's worker does not take requests")
        return segment

    def answer(self, segment: int) -> Gathered | NotGathered | None:
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
                self._announce_routes()

    def _announce_routes(self) -> None:
        self._introductions += 1
        self._send(self._introduction)

    def _send(self, message: AnnounceRoutes | Gather | Done) -> bool:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
