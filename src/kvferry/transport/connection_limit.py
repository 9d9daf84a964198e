"""Limit the number of connections of a listener.

Anyone who reaches the port can open connections before authentication. Each takes a file descriptor, and the
engine's process must not run out of them. At the limit, the kernel drops new connection requests, until a
quarter of the connections have ended. Connected peers are not affected. A peer that connects meanwhile
retries.

ZeroMQ cannot refuse a connection, and it cannot stop listening without closing the open connections. So a
socket filter (SO_ATTACH_FILTER, see socket(7)) drops every packet that arrives at the listening socket.
ZeroMQ reports a connection only after accepting it. So a flood can exceed the limit by the connections that
are accepted before the listener's thread runs. ZeroMQ stops accepting when a thousand events are queued.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from typing import Any

import zmq

from kvferry.limited_log import LimitedLog
from kvferry.operating_system import resource

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
# Timeout in seconds for a client to authenticate. A peer with the key needs milliseconds.
HANDSHAKE_SECONDS = 2.0

BACKLOG = 128
_SHARE_OF_DESCRIPTORS = 4
_EVENT = struct.Struct("=Hi")
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of asm-generic/socket.h
# ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC of zmq.h: the first message of a client cannot be decrypted.
_OTHER_KEY = 0x11000001

_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0
_PROGRAM = struct.pack("HL", 1, ctypes.addressof(_DROP))  # struct sock_fprog


class ConnectionLimiter:
    """Limits the number of open connections of one ZeroMQ socket. Only one thread may use it.

    Attributes:
        open: number of open connections.
        paused: True while new connections are not accepted.
        events: ZeroMQ monitor socket, for use in a poller. When it is readable, call `process_events`.
    """

    def __init__(
        self,
        listener: zmq.Socket[Any],
        max_connections: int | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Start to monitor a ZeroMQ socket that is not bound yet.

        Args:
            max_connections: None for a quarter of the process's limit of file descriptors, at most
                `MAX_CONNECTIONS`.
            handshake_seconds: timeout for a client to authenticate.
        """
        self.open, self.paused = 0, False
        self._listener, self._most = listener, max_connections or _limit()
        self._log = LimitedLog(logger)
        self._accepting: socket.socket | None = None
        listener.handshake_ivl = int(handshake_seconds * 1000)
        listener.backlog = BACKLOG
        told = f"inproc://connections-{id(self)}"
        listener.monitor(
            told,
            zmq.EVENT_LISTENING
            | zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        )
        self.events: zmq.Socket[Any] = listener.context.socket(zmq.PAIR)
        self.events.rcvhwm = 1  # in addition to the 1000 events that the other end queues
        self.events.connect(told)

    def process_events(self) -> None:
        """Process the queued connection events, and enforce the limit."""
        while (said := self._next()) is not None:
            event, value = said
            if event == zmq.EVENT_LISTENING:
                self._accepting = socket.socket(fileno=os.dup(value))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._on_failed_handshake(value)
            else:
                self.open += 1 if event == zmq.EVENT_ACCEPTED else -1
            if not self.paused and self.open >= self._most:
                self._pause()
        if self.paused and self.open <= self._most * 3 // 4:
            self._resume()

    def close(self) -> None:
        """Stop monitoring. Call this method before the listener's socket is closed."""
        # While events wait for space in the queue, ZeroMQ holds a lock that `disable_monitor` needs. So drain
        # the queue, and accept no new connections meanwhile.
        self.process_events()
        self._filter(_ATTACH_FILTER, _PROGRAM)
        while self._next() is not None:
            pass
        self._listener.disable_monitor()
        self.events.close(linger=0)
        if self._accepting is not None:
            self._accepting.close()

    def _next(self) -> tuple[int, int] | None:
        """Return the next (event, value) as in zmq_socket_monitor(3); None if none is queued."""
        try:
            frames = self.events.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        event, value = _EVENT.unpack(frames[0])
        return event, value

    def _on_failed_handshake(self, cause: int) -> None:
        # Others are port scanners and the like. ZeroMQ hides the client's address.
        if cause == _OTHER_KEY:
            self._log.say(
                "key",
                "a client was turned away because it has another key; if it is an engine of yours, give both "
                "the same secret_file (kvferry doctor prints the fingerprint of a key)",
            )

    def _pause(self) -> None:
        self._log.say(
            "crowded",
            f"{self.open} connections to one port of this engine, at most {self._most}: no more are accepted "
            "until some have ended; let only engines reach it (firewall, NetworkPolicy)",
        )
        self._filter(_ATTACH_FILTER, _PROGRAM)
        self.paused = True

    def _resume(self) -> None:
        self._filter(_DETACH_FILTER, 0)
        self.paused = False

    def _filter(self, option: int, value: bytes | int) -> None:
        if self._accepting is None:
            return
        try:
            self._accepting.setsockopt(socket.SOL_SOCKET, option, value)
        except OSError as error:  # this sandbox does not allow socket filters
            self._log.say(
                "filter",
                f"{self.open} connections to one port of this engine, at most {self._most}, and further ones "
                f"cannot be held back ({os.strerror(error.errno or 0)}); let only engines reach it "
                "(firewall, NetworkPolicy)",
            )


def _limit() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors // _SHARE_OF_DESCRIPTORS))
