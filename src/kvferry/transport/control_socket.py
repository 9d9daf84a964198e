"""One connection to a producer's control channel.

`ControlClient` polls many connections in one thread. A command that may wait, such as ``kvferry doctor``,
uses `ControlSocket.ask`.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from kvferry.transport import security
from kvferry.transport.endpoint import zmq_endpoint
from kvferry.transport.messages import MAX_REPLY_BYTES, Reply, Request, decode_reply, encode


class ControlSocket:
    """A socket that is connected to one control channel. Not thread-safe.

    Attributes:
        raw: the ZeroMQ socket, for a poller.
    """

    def __init__(self, context: zmq.Context[Any], host: str, port: int, keys: security.Keys) -> None:
        """Connect in the background.

        Raises:
            zmq.ZMQError: the address is malformed.
        """
        self.raw: zmq.Socket[Any] = context.socket(zmq.DEALER)
        try:
            self.raw.maxmsgsize = MAX_REPLY_BYTES
            self.raw.linger = 0
            security.secure_client(self.raw, keys)
            self.raw.connect(zmq_endpoint(self.raw, host, port))
        except zmq.ZMQError:
            self.raw.close()
            raise

    def send(self, message: Request) -> bool:
        """Queue a message; return False if the queue is full and the message is dropped."""
        try:
            self.raw.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes:
        """Return the next message, encoded; block until there is one."""
        frames: list[bytes] = self.raw.recv_multipart()
        return frames[-1]

    def ask(self, message: Request, deadline: float) -> Reply:
        """Send a message and block until the reply arrives.

        Args:
            message: a message that the producer answers.
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
        """Close the socket; queued messages may still be sent for `linger_milliseconds`."""
        self.raw.close(linger=linger_milliseconds)
