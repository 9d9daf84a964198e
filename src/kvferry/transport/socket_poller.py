"""Wait for messages on many ZeroMQ sockets, in a time that does not grow with their number.

`zmq.Poller` asks each socket in each call. Here, epoll waits for the file descriptors of all sockets
(``ZMQ_FD``). Such a descriptor only says that something about its socket may have changed, and sending a
message can consume the signal. So sockets whose state may have changed without a new signal are asked again
before the next wait. See the description of ``ZMQ_FD`` in ``zmq_getsockopt(3)``.
"""

from __future__ import annotations

import os
import select
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import zmq

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
        ready = self._readable(list(self._unsure))
        signalled = self._epoll.poll(0 if ready else seconds)
        for descriptor, _ in signalled:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
        names = [self._names[descriptor] for descriptor, _ in signalled if descriptor in self._names]
        ready += self._readable([name for name in names if name not in ready])
        # These may have further messages, for which no new signal comes.
        self._unsure = dict.fromkeys(ready)
        return ready

    def wake(self) -> None:
        """End the current or the next call of `wait`. Any thread may call it, until `close`."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Free the descriptors. Sockets stay open."""
        self._epoll.close()
        os.close(self._wake)

    def _readable(self, names: list[Name]) -> list[Name]:
        return [name for name in names if int(self._sockets[name].getsockopt(zmq.EVENTS)) & zmq.POLLIN]
