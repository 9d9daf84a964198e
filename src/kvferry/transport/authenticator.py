"""Authenticate the clients of a listener: a ZAP handler (rfc.zeromq.org/spec/27).

ZeroMQ asks the handler about every new client. Without a handler in the listener's context, ZeroMQ admits any
CURVE client, so the handler is bound before the listener. The handler checks a client's key before its
address, so a client without the key cannot make the engine resolve names.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.limited_log import LimitedLog
from kvferry.transport.address import parse_ip
from kvferry.transport.allowed_peers import AllowedPeers
from kvferry.transport.resolver import PeerResolver, ResolveName
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

_VERSION = b"1.0"
# Number of frames in a ZAP request: version, id, domain, address, routing id, mechanism, CURVE key.
_FRAMES = 7

# ZAP status code of a temporary error: ZeroMQ closes the connection, and the client connects again.
_TRY_AGAIN = b"300"


class Authenticator:
    """A thread that decides which clients may connect to a ZeroMQ listener.

    A client is admitted if it has the engines' key pair and connects from an allowed address.
    """

    def __init__(
        self, context: zmq.Context[Any], keys: Keys, peers: AllowedPeers, resolve: ResolveName | None = None
    ) -> None:
        """Bind the socket on which ZeroMQ asks about new clients, and start the thread that answers.

        Args:
            context: ZeroMQ context of the listener; only one listener may use it.
            keys: key pair that a client must have.
            resolve: resolves the names in `peers`; None for the system's resolver.
        """
        self._public, self._names = z85.decode(keys.public), PeerResolver(peers, resolve=resolve)
        self._log = LimitedLog(logger)
        self._socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvferry-zap", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Close the listener first: its clients cannot be authenticated without it."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while self._wake not in dict(poller.poll()):
            frames = self._socket.recv_multipart()
            try:
                code, why = self._verdict(frames)
            except Exception:  # ZeroMQ waits for a reply to each request
                logger.exception("control channel: a client is refused")
                code, why = b"500", b"error"
            request = frames[1] if len(frames) > 1 else b""
            self._socket.send_multipart([_VERSION, request, code, why, b"", b""])
        self._socket.close()

    def _verdict(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        """Decide on a client, from ZeroMQ's request about it; return ZAP's status code and text."""
        if len(frames) != _FRAMES or frames[0] != _VERSION:
            return b"400", b"not a CURVE client"
        _, _, _, client, _, mechanism, key = frames
        if mechanism != b"CURVE" or key != self._public:
            return b"400", b"not this key"
        # The key comes first: who does not have it must not make the engine resolve names.
        host = client.decode("ascii", "replace")
        address = parse_ip(host)
        admitted = address is not None and self._names.is_allowed(address)
        if admitted:
            return b"200", b"OK"
        if admitted is None:
            return _TRY_AGAIN, b"names of peers are being resolved"
        self._log.say(
            host, f"a client at {host} has the key of this engine, but is none of its peers; list it in peers"
        )
        return b"400", b"not among the peers"
