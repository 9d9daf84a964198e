"""One connection to a producer's control channel.

`ControlClient` polls many connections in one thread. A command that may block, such as ``kvferry doctor``,
uses `ControlSocket.ask`.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.transport import security
from kvferry.transport.address import zmq_endpoint
from kvferry.transport.messages import MAX_REPLY_BYTES, Reply, Request, decode_reply, encode

# Number of ZeroMQ sockets that a `ControlSocket` takes: its own, and two for its connection events.
SOCKETS = 3


class ControlSocket:
    """A socket that is connected to the control channel of one peer. Not thread-safe.

    Attributes:
        raw: underlying ZeroMQ socket, for use in a poller.
        events: ZeroMQ monitor socket, for use in a poller. When it is readable, call `is_up`.
    """

    def __init__(self, context: zmq.Context[Any], host: str, port: int, keys: security.Keys) -> None:
        """Create the socket and connect in the background. Raise zmq.ZMQError if the address is malformed."""
        self.raw: zmq.Socket[Any] = context.socket(zmq.DEALER)
        try:
            self.raw.maxmsgsize = MAX_REPLY_BYTES
            self.raw.linger = 0
            security.secure_client(self.raw, keys)
            self.events: zmq.Socket[Any] = self.raw.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
            )
            self.raw.connect(zmq_endpoint(self.raw, host, port))
        except zmq.ZMQError:
            self.close()
            raise

    def is_up(self) -> bool:
        """Take the next connection event, and return whether the producer has accepted the connection.

        False means that an attempt to connect has failed: nobody listens there, or the host is unreachable.
        """
        # After either event, ZeroMQ goes on: it connects again, also after a connection has ended.
        return recv_monitor_message(self.events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def send(self, message: Request) -> bool:
        """Queue a message to the producer; drop it and return False if the queue is full."""
        try:
            self.raw.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes:
        frames: list[bytes] = self.raw.recv_multipart()
        return frames[-1]

    def ask(self, message: Request, deadline: float) -> Reply:
        """Send a request, block until the reply arrives, and return it.

        Args:
            deadline: seconds of `time.monotonic`.

        Raises:
            TimeoutError: no reply arrived by the deadline.
            ProtocolError: the reply cannot be decoded.
        """
        self.send(message)
        if not self.raw.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise TimeoutError("the control channel does not answer")
        return decode_reply(self.receive())

    def close(self, linger_milliseconds: int = 0) -> None:
        """Close the socket. Queued messages are still sent, for at most `linger_milliseconds`."""
        if (events := getattr(self, "events", None)) is not None:  # the constructor may have failed
            self.raw.disable_monitor()
            events.close()
        self.raw.close(linger=linger_milliseconds)
