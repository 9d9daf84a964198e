"""The reader's end of the gather channel: one DEALER socket for each rank of a peer.

A lane owns it and polls it. No method blocks.
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
"""Maximum number of messages queued for a rank that does not answer; more are an error."""


class GatherClient:
    """Asks one rank to gather cells.

    Attributes:
        silent_until: the rank is not asked before this time of the lane's clock; 0 once it has answered.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        host: str,
        port: int,
        routes: Sequence[GatherRoute],
        keys: security.Keys,
    ) -> None:
        """Connect, and announce the routes of later `ask` calls."""
        self.silent_until = 0.0
        self._socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_REPLY_BYTES
        self._socket.sndhwm = _QUEUED
        security.secure_client(self._socket, keys)
        self._socket.connect(zmq_endpoint(self._socket, host, port))
        self._introduction = AnnounceRoutes(PROTOCOL, list(routes))
        self._introductions = 0
        self._introduce()
        self._numbers = itertools.count(1)
        self._wanted: dict[
            int, int
        ] = {}  # chunk to how often we had introduced ourselves when it was asked for
        self._answers: dict[int, Gathered | NotGathered] = {}

    @property
    def socket(self) -> zmq.Socket[Any]:
        """The socket, for polling."""
        return self._socket

    @property
    def waiting(self) -> bool:
        """True if a request has no answer yet."""
        return bool(self._wanted)

    def is_silent(self, now: float) -> bool:
        """Return whether the rank timed out recently and has not answered since."""
        self._receive()
        return now < self.silent_until

    def ask(self, route: int, lease: LeaseWord, blocks: Int64s, cell: int) -> int:
        """Ask the rank to gather cells; return the number of the segment.

        Args:
            route: index of an announced route.
            lease: lease word of the producer.
            blocks: source block of every cell, int64 of shape (n,).
            cell: index of the first cell within its block.
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
        )
        if not self._send(request):
            self._answers[segment] = NotGathered(segment, "the producer's worker does not take requests")
        return segment

    def answer(self, segment: int) -> Gathered | NotGathered | None:
        """Remove and return the reply for a segment; None if there is none yet."""
        self._receive()
        found = self._answers.pop(segment, None)
        if found is not None:
            del self._wanted[segment]
        return found

    def done(self, segment: int) -> None:
        """Tell the rank that a segment has been read or is no longer needed."""
        self._wanted.pop(segment, None)
        self._answers.pop(segment, None)
        self._send(Done(segment))

    def close(self) -> None:
        """Disconnect."""
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
            # It lost us: by a broken connection, or among too many readers. One of many such answers counts.
            unknown = isinstance(reply, NotGathered) and reply.unknown
            if unknown and self._wanted[reply.segment] == self._introductions:
                self._introduce()

    def _introduce(self) -> None:
        self._introductions += 1
        self._send(self._introduction)

    def _send(self, message: AnnounceRoutes | Gather | Done) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
