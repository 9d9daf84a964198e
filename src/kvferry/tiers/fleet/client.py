"""The reader's end of the fleet channel: one thread that asks other engines about chunks.

Threads that read chunks wait for answers, and the engine's thread has a function called. An engine that does
not answer in time counts as having nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from msgspec import structs

from kvferry.common.errors import ProtocolError
from kvferry.common.limited_log import LimitedLog
from kvferry.tiers.fleet.messages import MAX_REPLY_BYTES, OtherProtocol, Reply, Request, decode_reply
from kvferry.transport import security
from kvferry.transport.addresses import AllowedPeers, zmq_endpoint
from kvferry.transport.handshake import Address
from kvferry.transport.messages import encode
from kvferry.transport.resolver import AddressNotAllowed, PeerResolver
from kvferry.transport.sockets import SocketPoller, warn_if_late

logger = logging.getLogger(__name__)

MAX_ENGINES = 1024  # maximum number of engines with an open connection
_IDLE_SECONDS = 60.0
_LONGEST_WAIT = 1.0
_QUEUED = 1000

Answer: TypeAlias = Reply | None
"""The answer to a request; None if the engine has not answered, or cannot be asked."""


@dataclass(slots=True)
class _Asked:
    """A request without an answer so far. `deadline` is in monotonic seconds."""

    address: Address
    deadline: float
    future: Future[Answer]


@dataclass(slots=True)
class _Connection:
    socket: zmq.Socket[Any]
    used_at: float


class FleetClient:
    """Asks other engines' fleet servers. Any thread may call `ask`."""

    def __init__(
        self,
        keys: security.Keys,
        peers: AllowedPeers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._clock = keys, clock
        self._numbers = itertools.count(1)
        self._commands: deque[tuple[Address, Request, float, Future[Answer]]] = deque()
        self._unnamed: list[tuple[Address, Request, float, Future[Answer]]] = []
        self._asked: dict[int, _Asked] = {}  # by number, in the order of their deadlines, almost
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 2 * MAX_ENGINES
        self._connections: dict[Address, _Connection] = {}
        self._poller = SocketPoller[Address]()
        self._names = PeerResolver(peers, self._poller.wake, clock=clock)
        self._log = LimitedLog(logger)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvferry-fleet-client", daemon=True)
        self._thread.start()

    def ask(self, address: Address, request: Request, seconds: float) -> Future[Answer]:
        """Send a request, whose number is set here. The future is done after `seconds` at the latest."""
        future: Future[Answer] = Future()
        if self._stop:
            future.set_result(None)
            return future
        numbered = structs.replace(request, number=next(self._numbers))
        self._commands.append((address, numbered, self._clock() + seconds, future))
        self._poller.wake()
        return future

    def close(self) -> None:
        """End the thread. Requests without an answer are answered with None."""
        self._stop = True
        self._poller.wake()
        self._thread.join()
        self._names.close()
        self._poller.close()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            soonest = min((one.deadline for one in self._asked.values()), default=float("inf"))
            seconds = min(_LONGEST_WAIT, max(0.0, soonest - self._clock()) + 0.001)
            due = time.monotonic() + seconds
            heard = self._poller.wait(0 if self._commands else seconds)
            warn_if_late(self._log, "fleet channel, asking", due)
            try:
                self._run_once(heard)
            except Exception as error:  # noqa: BLE001 - one engine's message must not silence all others
                self._log.say(type(error).__name__, "fleet channel: an unexpected error", error)
        for *_, future in (*self._commands, *self._unnamed):
            future.set_result(None)
        for one in self._asked.values():
            one.future.set_result(None)
        for address in list(self._connections):
            self._close(address)
        self._context.term()

    def _run_once(self, heard: list[Address]) -> None:
        for address in heard:
            self._receive(address)
        unnamed, self._unnamed = self._unnamed, []
        for command in unnamed:
            self._send(*command)
        while self._commands:
            self._send(*self._commands.popleft())
        now = self._clock()
        for number in [number for number, one in self._asked.items() if one.deadline <= now]:
            self._asked.pop(number).future.set_result(None)
        for address, connection in list(self._connections.items()):
            if now - connection.used_at > _IDLE_SECONDS:
                self._close(address)

    def _send(self, address: Address, request: Request, deadline: float, future: Future[Answer]) -> None:
        now = self._clock()
        try:
            connection = self._connections.get(address) or self._open(address)
        except (AddressNotAllowed, zmq.ZMQError) as error:
            self._log.say(f"{address}", f"fleet: engine {address[0]}:{address[1]} cannot be asked: {error}")
            future.set_result(None)
            return
        if deadline <= now:
            future.set_result(None)
        elif connection is None:
            self._unnamed.append((address, request, deadline, future))
        else:
            connection.used_at = now
            self._asked[request.number] = _Asked(address, deadline, future)
            try:
                connection.socket.send(encode(request), zmq.DONTWAIT)
            except zmq.Again:
                self._asked.pop(request.number).future.set_result(None)
            self._poller.note_sent(address)

    def _open(self, address: Address) -> _Connection | None:
        """Connect to an engine, in the background; None while its name is being resolved."""
        place = self._names.resolve(address[0])
        if place is None:
            return None
        if len(self._connections) >= MAX_ENGINES:
            self._close(min(self._connections, key=lambda one: self._connections[one].used_at))
        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.maxmsgsize, socket.sndhwm = 0, MAX_REPLY_BYTES, _QUEUED
        security.secure_client(socket, self._keys)
        try:
            socket.connect(zmq_endpoint(socket, place, address[1]))
        except zmq.ZMQError:
            socket.close()
            raise
        self._poller.add(address, socket)
        connection = self._connections[address] = _Connection(socket, self._clock())
        return connection

    def _close(self, address: Address) -> None:
        connection = self._connections.pop(address)
        self._poller.remove(address)
        connection.socket.close()

    def _receive(self, address: Address) -> None:
        data = self._connections[address].socket.recv_multipart()[-1]
        try:
            reply = decode_reply(data)
        except ProtocolError as error:
            self._log.say(f"{address}", f"fleet: engine {address[0]}:{address[1]}: {error}")
            return
        asked = self._asked.get(reply.number)
        # Another engine must not answer for this one.
        if asked is None or asked.address != address:
            return
        del self._asked[reply.number]
        if isinstance(reply, OtherProtocol):
            self._log.say(
                f"{address}",
                f"fleet: engine {address[0]}:{address[1]} speaks protocol {reply.protocol} of the fleet "
                "channel, and this one another; run the same release of kvferry on both",
            )
            asked.future.set_result(None)
            return
        asked.future.set_result(reply)
