"""The reader's end of the gather channel: one ZeroMQ DEALER socket for each rank of a peer.

Over this channel a reader asks a worker to gather cells: to pack them into the worker's staging memory, where
a READ then fetches them. A lane (reading thread) owns the client and polls it. No method blocks.
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
from kvferry.transport.endpoint import zmq_endpoint
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

_QUEUED = 10_000
"""Maximum number of messages queued for a rank that does not read them; sending more fails."""


class GatherClient:
    """A connection to one rank of a peer, over which a lane (reading thread) asks the rank to pack cells.

    A cell is the part of a block that moves as one unit. The cells of one request (one call of `ask`) are
    called a *segment*. A route is a set of layers that are read together. The client announces its routes
    to the rank; requests refer to them by index.

    Attributes:
        silent_until: time until which the lane sends no requests to the rank, in seconds of the lane's clock.
            The lane sets it when a request has timed out. Any reply of the rank resets it to 0.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        host: str,
        port: int,
        routes: Sequence[GatherRoute],
        keys: security.Keys,
    ) -> None:
        """Connect to the rank in the background, and send it the routes that later requests refer to.

        Args:
            context: ZeroMQ context.
            host: IP address of the rank's gather channel, over which readers ask the rank to pack cells
                (parts of blocks).
            port: port of the gather channel.
            routes: routes (sets of layers that are read together). `ask` takes an index into this sequence.
            keys: CURVE keys, with which peers authenticate each other.
        """
        self.silent_until = 0.0
        self._socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_REPLY_BYTES
        self._socket.sndhwm = _QUEUED
        security.secure_client(self._socket, keys)
        self._socket.connect(zmq_endpoint(self._socket, host, port))
        self._introduction = AnnounceRoutes(PROTOCOL, list(routes))
        self._introductions = 0
        self._announce_routes()
        self._numbers = itertools.count(1)
        self._wanted: dict[int, int] = {}  # segment to number of announcements when it was requested
        self._answers: dict[int, Gathered | NotGathered] = {}

    @property
    def socket(self) -> zmq.Socket[Any]:
        """The underlying ZeroMQ socket, for use in a poller."""
        return self._socket

    @property
    def waiting(self) -> bool:
        """True while any request to pack cells (parts of blocks) is open.

        A request is closed when `answer` has returned the reply to it, or when `done` is called.
        """
        return bool(self._wanted)

    def is_silent(self, now: float) -> bool:
        """Return whether the lane must send no requests now, because `silent_until` is in the future.

        Process the replies that have arrived first, because any reply resets `silent_until`.

        Args:
            now: current time, in seconds of the lane's clock.
        """
        self._receive()
        return now < self.silent_until

    def ask(self, route: int, lease: LeaseWord, blocks: Int64s, cell: int, *, shared: bool = False) -> int:
        """Ask the rank to pack cells (parts of blocks) into its staging memory.

        Args:
            route: index of the cells' route (set of layers that are read together) in the constructor's
                argument `routes`.
            lease: index and valid value of the lease word, an integer in the rank's memory. The word shows
                whether the lease on the source blocks is valid.
            blocks: id of the source block that contains each cell, int64 of shape (n,). The cells are
                consecutive in the order of tokens.
            cell: index of the first cell within its block.
            shared: True to pack the cells into the rank's memory file, which this worker has mapped.

        Returns:
            Id of the segment (the cells of this request), for `answer` and `done`.
        """
        segment = next(self._numbers) % (1 << 31)
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
        if not self._send(request):
            self._answers[segment] = NotGathered(segment, "the producer's worker does not take requests")
        return segment

    def answer(self, segment: int) -> Gathered | NotGathered | None:
        """Return the rank's reply to a request to pack cells, and close the request.

        Return None if no reply has arrived yet.

        Args:
            segment: id of the segment (the cells of the request), from `ask`.
        """
        self._receive()
        found = self._answers.pop(segment, None)
        if found is not None:
            del self._wanted[segment]
        return found

    def done(self, segment: int) -> None:
        """Tell the rank to free the staging memory of a segment: the packed cells of one request.

        This reader no longer needs the segment. Later replies about it are ignored.

        Args:
            segment: id of the segment, from `ask`.
        """
        self._wanted.pop(segment, None)
        self._answers.pop(segment, None)
        self._send(Done(segment))

    def close(self) -> None:
        """Close the connection to the rank."""
        self._socket.close()

    def _receive(self) -> None:
        while self._socket.poll(0):
            try:
                reply = decode_reply(self._socket.recv())
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
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
