"""Sockets that are connected to peers' channels, and the thread of a client that has many of them.

The cost of a wait for sockets does not grow with their number. `zmq.Poller` asks each socket in each call.
Here, epoll waits for the file descriptors of all sockets (``ZMQ_FD``). Such a descriptor only says that
something about its socket may have changed, and sending a message can consume the signal. So sockets whose
state may have changed without a new signal are asked again before the next wait. See the description of
``ZMQ_FD`` in ``zmq_getsockopt(3)``.
"""

from __future__ import annotations

import logging
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.common.limited_log import LimitedLog
from kvferry.common.threads import Thread
from kvferry.transport import security
from kvferry.transport.addresses import AllowedPeers, zmq_endpoint
from kvferry.transport.messages import MAX_REPLY_BYTES, Reply, Request, decode_reply, encode
from kvferry.transport.resolver import PeerResolver, ResolveName

logger = logging.getLogger(__name__)

# Number of ZeroMQ sockets that a `ControlSocket` takes: its own, and two for its connection events.
SOCKETS = 3

LATE_SECONDS = 1.0

# Maximum seconds that a client waits, so that delays of its thread are noticed.
_LONGEST_WAIT = 1.0

Name = TypeVar("Name", bound=Hashable)


class SocketPoller(Generic[Name]):
    """Finds the sockets that have messages to receive. Only one thread may use it, except for `wake`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._sockets: dict[Name, zmq.Socket[Any]] = {}
        self._names: dict[int, Name] = {}
        self._unsure: dict[Name, None] = {}  # in the order in which they became so

    def add(self, name: Name, socket: zmq.Socket[Any]) -> None:
        self._sockets[name] = socket
        descriptor = int(socket.getsockopt(zmq.FD))
        self._names[descriptor] = name
        self._epoll.register(descriptor, select.EPOLLIN)
        self._unsure[name] = None  # a message may have arrived before

    def remove(self, name: Name) -> None:
        """Remove a socket. Call this before the socket is closed."""
        descriptor = int(self._sockets.pop(name).getsockopt(zmq.FD))
        del self._names[descriptor]
        self._epoll.unregister(descriptor)
        self._unsure.pop(name, None)

    def note_sent(self, name: Name) -> None:
        """Record that a message was sent on a socket, which may have consumed the signal of an arrival."""
        self._unsure[name] = None

    def wait(self, seconds: float) -> list[Name]:
        """Wait at most `seconds` until sockets have messages, or until `wake` is called; return their names.

        Receive at least one message from each: the next call returns those that have more.
        """
        ready, heard = self._readable(self._unsure), list[Name]()
        for descriptor, _ in self._epoll.poll(0 if ready else seconds):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif (name := self._names.get(descriptor)) is not None and name not in ready:
                heard.append(name)
        ready += self._readable(heard)
        # These may have further messages, for which no new signal comes.
        self._unsure = dict.fromkeys(ready)
        return ready

    def wake(self) -> None:
        """End the current or the next call of `wait`. Any thread may call it, until `close`."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def _readable(self, names: Iterable[Name]) -> list[Name]:
        return [name for name in names if int(self._sockets[name].getsockopt(zmq.EVENTS)) & zmq.POLLIN]


def new_dealer(context: zmq.Context[Any], keys: security.Keys, max_reply_bytes: int) -> zmq.Socket[Any]:
    """Return a socket that can be connected to a peer's channel. Closing it drops what is not sent yet."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.linger, socket.maxmsgsize = 0, max_reply_bytes
    security.secure_client(socket, keys)
    return socket


class ChannelClient(ABC, Generic[Name]):
    """A thread that exchanges messages with the channels of many peers, over sockets that it names.

    An error in a round is logged, and the thread goes on.
    """

    def __init__(
        self,
        channel: str,
        thread: str,
        keys: security.Keys,
        peers: AllowedPeers,
        max_sockets: int,
        resolve: ResolveName | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the thread, which the subclass starts. `channel` is the name of the channel in messages."""
        self._channel, self._keys, self._clock = channel, keys, clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = max_sockets
        self._poller = SocketPoller[Name]()
        self._names = PeerResolver(peers, self._poller.wake, resolve, clock)
        self._log = LimitedLog(logger)  # for the thread
        self._stop = False
        self._thread = Thread(self._run, thread)

    def close(self) -> None:
        """End the thread, after a last round for what was queued before."""
        self._stop = True
        self._poller.wake()
        self._thread.join()
        self._names.close()
        self._poller.close()

    @abstractmethod
    def _seconds(self) -> float:
        """Return after how many seconds, 0 for at once, a round is due even if no message arrives."""

    @abstractmethod
    def _run_once(self, heard: list[Name]) -> None:
        """Receive a message from each of these sockets, and do what is queued and due."""

    @abstractmethod
    def _close_all(self) -> None:
        """Close all sockets, because the thread ends."""

    def _run(self) -> None:
        stop = False
        while not stop:
            seconds = min(_LONGEST_WAIT, self._seconds())
            due = time.monotonic() + seconds
            heard = self._poller.wait(seconds)
            warn_if_late(self._log, f"{self._channel}, asking", due)
            stop = self._stop
            try:
                self._run_once(heard)
            except Exception as error:  # noqa: BLE001 - one peer's message must not silence all others
                self._log.say(type(error).__name__, f"{self._channel}: an unexpected error", error)
        self._close_all()
        self._context.term()


class ControlSocket:
    """A socket that is connected to the control channel of one peer. Not thread-safe.

    `events` is a ZeroMQ monitor socket. When it is readable, call `is_up`.
    """

    def __init__(self, context: zmq.Context[Any], host: str, port: int, keys: security.Keys) -> None:
        """Create the socket and connect in the background. Raise zmq.ZMQError if the address is malformed."""
        self.raw = new_dealer(context, keys, MAX_REPLY_BYTES)
        try:
            self.events: zmq.Socket[Any] = self.raw.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
            )
            self.raw.connect(zmq_endpoint(self.raw, host, port))
        except zmq.ZMQError:
            self.close()
            raise

    def is_up(self) -> bool:
        """Take a connection event. False if an attempt failed: nobody listens, or the host is unreachable."""
        # After either event, ZeroMQ goes on: it connects again, also after a connection has ended.
        return recv_monitor_message(self.events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def send(self, message: Request) -> bool:
        """Queue a message to the producer; drop it and return False if the queue is full."""
        try:
            self.raw.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def ask(self, message: Request, deadline: float) -> Reply:
        """Send a request, and block until the reply. TimeoutError after `deadline`, of `time.monotonic`."""
        self.send(message)
        if not self.raw.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise TimeoutError("the control channel does not answer")
        return decode_reply(self.raw.recv_multipart()[-1])

    def close(self, linger_milliseconds: int = 0) -> None:
        """Close the socket. Queued messages are still sent, for at most `linger_milliseconds`."""
        if (events := getattr(self, "events", None)) is not None:  # the constructor may have failed
            self.raw.disable_monitor()
            events.close()
        self.raw.close(linger=linger_milliseconds)


def warn_if_late(
    log: LimitedLog, thread: str, due: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Log a warning if a thread's wait should have ended long ago, at the time `due` of the clock."""
    if (late := clock() - due) > LATE_SECONDS:
        log.say(
            thread,
            f"{thread}: did not run for {late:.1f} s; peers may take this engine for dead: are there more "
            "busy processes on this machine than cores?",
        )
