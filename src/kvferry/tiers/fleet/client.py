"""The reader's end of the fleet channel: one thread that asks other engines about chunks.

Threads that read chunks wait for answers, and the engine's thread has a function called. An engine that does
not answer in time counts as having nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from msgspec import structs

from kvferry.common.errors import ProtocolError
from kvferry.tiers.fleet.messages import MAX_REPLY_BYTES, OtherProtocol, Reply, Request, decode_reply
from kvferry.transport.addresses import AllowedPeers, zmq_endpoint
from kvferry.transport.handshake import Address
from kvferry.transport.messages import encode
from kvferry.transport.resolver import AddressNotAllowed
from kvferry.transport.security import Keys
from kvferry.transport.sockets import ChannelClient, new_dealer

MAX_ENGINES = 1024  # maximum number of engines with an open connection
_IDLE_SECONDS = 60.0
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


class FleetClient(ChannelClient[Address]):
    """Asks other engines' fleet servers. Any thread may call `ask`."""

    def __init__(
        self,
        keys: Keys,
        peers: AllowedPeers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("fleet channel", "kvferry-fleet-client", keys, peers, 2 * MAX_ENGINES, clock=clock)
        self._numbers = itertools.count(1)
        self._commands: deque[tuple[Address, Request, float, Future[Answer]]] = deque()
        self._unnamed: list[tuple[Address, Request, float, Future[Answer]]] = []
        self._asked: dict[int, _Asked] = {}  # by number, in the order of their deadlines, almost
        self._connections: dict[Address, _Connection] = {}
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

    # -- the thread ---------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        if self._commands:
            return 0.0
        soonest = min((one.deadline for one in self._asked.values()), default=float("inf"))
        return max(0.0, soonest - self._clock()) + 0.001

    def _close_all(self) -> None:
        # Nobody answers these any more.
        for *_, future in (*self._commands, *self._unnamed):
            future.set_result(None)
        for one in self._asked.values():
            one.future.set_result(None)
        for address in list(self._connections):
            self._close(address)

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
        socket = new_dealer(self._context, self._keys, MAX_REPLY_BYTES)
        socket.sndhwm = _QUEUED
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
