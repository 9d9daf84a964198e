"""A listening ZeroMQ ROUTER socket for peers: encrypted, authenticated, with a limit on connections."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import zmq

from kvferry.errors import ConfigError, ProtocolError
from kvferry.transport import security
from kvferry.transport.address import zmq_endpoint
from kvferry.transport.allowed_peers import ANY_PEER, AllowedPeers
from kvferry.transport.authenticator import Authenticator
from kvferry.transport.connection_limit import HANDSHAKE_SECONDS, ConnectionLimiter
from kvferry.transport.port_range import PortRange
from kvferry.transport.resolver import ResolveName

# Errors of ports that this process cannot have: another process has them, or they are below 1024.
_TAKEN = (errno.EADDRINUSE, errno.EACCES)
# Maximum number of queued messages from a peer, and of queued replies to it. ZeroMQ holds back further
# messages, and drops further replies.
_QUEUED = 64


class Listener:
    """A listening ZeroMQ socket that receives messages from peers and sends replies.

    One thread at a time may use the socket; any thread may call `interrupt`.

    Attributes:
        port: port that the socket listens on.
        connections: counts and limits the open connections.
    """

    def __init__(
        self,
        channel: str,
        host: str,
        port: int | PortRange,
        keys: security.Keys,
        max_message_bytes: int,
        max_connections: int | None = None,
        peers: AllowedPeers = ANY_PEER,
        resolve: ResolveName | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Create and bind the socket.

        Args:
            channel: name of the channel in error messages.
            port: 0 for any free port, or a range for a free port of it.
            max_message_bytes: a peer that sends a longer message is disconnected.
            max_connections: None for the default of `ConnectionLimiter`.
            resolve: resolves the names in `peers`; None for the system's resolver.
            handshake_seconds: timeout for a client to authenticate.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._lock, self._closed = threading.Lock(), False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        # Before the listener: without an authenticator, ZeroMQ admits any CURVE client.
        self._door = Authenticator(self._context, keys, peers, resolve)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = max_message_bytes
        self._socket.rcvhwm = self._socket.sndhwm = _QUEUED
        security.secure_server(self._socket, keys)
        self.connections = ConnectionLimiter(self._socket, max_connections, handshake_seconds)
        try:
            self._bind(host, port)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{channel}: cannot listen on {host}{_port_text(port)}: "
                f"{zmq.strerror(error.errno or 0)}; set {_remedy(error, port)}"
            ) from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.connections.events, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def _bind(self, host: str, port: int | PortRange) -> None:
        candidates = [*port] if isinstance(port, PortRange) else [port or "*"]
        for number, one in enumerate(candidates, 1):
            try:
                self._socket.bind(zmq_endpoint(self._socket, host, one))
            except zmq.ZMQError as error:
                if error.errno not in _TAKEN or number == len(candidates):
                    raise
            else:
                return

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a message, and return whether one has arrived.

        Meanwhile, enforce the limit on connections. After `interrupt`, do not wait.
        """
        heard = dict(self._poller.poll(int(seconds * 1000)))
        if self.connections.events in heard:
            self.connections.process_events()
        return self._socket in heard

    def receive(self) -> tuple[bytes, bytes]:
        """Return the next message and its sender's id. Raise ProtocolError if it has more than one frame."""
        frames = self._socket.recv_multipart()
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames, expected a sender and one message")
        return frames[0], frames[1]

    def send(self, to: bytes, message: bytes) -> None:
        """Send a reply. It is dropped if the peer has disconnected."""
        self._socket.send_multipart([to, message])

    def interrupt(self) -> None:
        """End the current call of `wait` and all later ones at once. Do nothing after `close`."""
        with self._lock:  # after `close`, another file may have the descriptor's number
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the socket. Replies that have not been sent are dropped."""
        with self._lock:
            self._closed = True
            os.close(self._wake)
        self.connections.close()
        self._socket.close()
        self._door.close()  # last: clients of an open listener need it
        self._context.term()


def _port_text(port: int | PortRange) -> str:
    if isinstance(port, PortRange):
        return f", any port of {port}"
    return f" port {port}" if port else ""


def _remedy(error: zmq.ZMQError, port: int | PortRange) -> str:
    if error.errno in _TAKEN:
        if isinstance(port, PortRange):
            return "ports to another range, with free ports from 1024 on"
        return "another port, or 0 for any free one"
    return "host to an address of this machine"
