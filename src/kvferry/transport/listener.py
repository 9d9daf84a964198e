"""A listening ZeroMQ ROUTER socket for peers: encrypted, authenticated, with a limit on connections.

Servers of channels give it a function that answers a message, and its thread calls that until `close`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.common.errors import ConfigError, KVFerryError, ProtocolError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.machine import resource
from kvferry.common.threads import Thread, on_any_core
from kvferry.transport import security
from kvferry.transport.addresses import ANY_PEER, AllowedPeers, PortRange, parse_ip, zmq_endpoint
from kvferry.transport.resolver import PeerResolver, ResolveName
from kvferry.transport.security import Keys
from kvferry.transport.sockets import warn_if_late

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
# Timeout in seconds for a client to authenticate. A peer with the key needs milliseconds.
HANDSHAKE_SECONDS = 2.0

BACKLOG = 128
_EVENT = struct.Struct("=Hi")
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of asm-generic/socket.h
# ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC of zmq.h: the first message of a client cannot be decrypted.
_OTHER_KEY = 0x11000001
_OTHER_KEY_TEXT = (
    "a client was turned away because it has another key; if it is an engine of yours, give both the same "
    "secret_file (kvferry doctor prints the fingerprint of a key)"
)

_VERSION = b"1.0"  # of ZAP, by which ZeroMQ asks whether to admit a client
# Number of frames in a ZAP request: version, id, domain, address, routing id, mechanism, CURVE key.
_FRAMES = 7
# ZAP status code of a temporary error: ZeroMQ closes the connection, and the client connects again.
_TRY_AGAIN = b"300"

# Errors of ports that this process cannot have: another process has them, or they are below 1024.
_TAKEN = (errno.EADDRINUSE, errno.EACCES)
# Maximum number of queued messages from a peer, and of queued replies to it. ZeroMQ holds back further
# messages, and drops further replies.
_QUEUED = 64

# Maximum seconds between two looks at what is due without a message.
_POLL_SECONDS = 0.2

_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0
_PROGRAM = struct.pack("HL", 1, ctypes.addressof(_DROP))  # struct sock_fprog


class _ConnectionLimiter:
    """Limits the number of open connections of one ZeroMQ socket. Only one thread may use it.

    `events` is a ZeroMQ monitor socket. When it is readable, call `process_events`.
    """

    def __init__(
        self, listener: zmq.Socket[Any], max_connections: int | None, handshake_seconds: float
    ) -> None:
        self.open, self.paused = 0, False
        self._listener, self._most = listener, max_connections or _default_limit()
        self._log = LimitedLog(logger)
        self._accepting: socket.socket | None = None
        listener.handshake_ivl = int(handshake_seconds * 1000)
        listener.backlog = BACKLOG
        told = f"inproc://connections-{id(self)}"
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        listener.monitor(told, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | ends)
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
                # Others are port scanners and the like. ZeroMQ hides the client's address.
                if value == _OTHER_KEY:
                    self._log.say("key", _OTHER_KEY_TEXT)
            else:
                self.open += 1 if event == zmq.EVENT_ACCEPTED else -1
            if not self.paused and self.open >= self._most:
                self._pause()
        if self.paused and self.open <= self._most * 3 // 4:
            self._filter(_DETACH_FILTER, 0)
            self.paused = False

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

    def _pause(self) -> None:
        self._log.say(
            "crowded",
            f"{self.open} connections to one port of this engine, at most {self._most}: no more are accepted "
            "until some have ended; let only engines reach it (firewall, NetworkPolicy)",
        )
        self._filter(_ATTACH_FILTER, _PROGRAM)
        self.paused = True

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


def _default_limit() -> int:
    """Return a quarter of the process's limit of file descriptors, at most `MAX_CONNECTIONS`."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors // 4))


class _Authenticator:
    """A thread that admits clients to a listener if they have the key pair and an allowed address."""

    def __init__(
        self, context: zmq.Context[Any], keys: Keys, peers: AllowedPeers, resolve: ResolveName | None = None
    ) -> None:
        """Bind the socket on which ZeroMQ asks about new clients of this context, and start the thread."""
        self._public, self._names = z85.decode(keys.public), PeerResolver(peers, resolve=resolve)
        self._log = LimitedLog(logger)
        self._socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = Thread(self._run, "kvferry-zap")
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


class Listener:
    """A listening ZeroMQ socket for peers, and the thread that answers them.

    Without `serve`, one thread at a time may use it. Any may call `interrupt` and `close`.

    Attributes:
        rejected: number of messages dropped because `answer` has raised a KVFerryError.
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
        """Create and bind the socket, or raise ConfigError if the address cannot be bound.

        Args:
            channel: name of the channel in messages.
            port: 0 for any free port, or a range for a free port of it.
            max_message_bytes: a peer that sends a longer message is disconnected.
            max_connections: None for a limit by that of the process's file descriptors.
        """
        self.rejected = 0
        self._channel, self._log = channel, LimitedLog(logger)
        self._thread: threading.Thread | None = None
        self._stop = False
        self._lock, self._closed = threading.Lock(), False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        # Before the listener: without an authenticator, ZeroMQ admits any CURVE client.
        # ZeroMQ starts its threads with the first socket.
        with on_any_core():
            self._door = _Authenticator(self._context, keys, peers, resolve)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = max_message_bytes
        self._socket.rcvhwm = self._socket.sndhwm = _QUEUED
        security.secure_server(self._socket, keys)
        self.connections = _ConnectionLimiter(self._socket, max_connections, handshake_seconds)
        try:
            self._bind(host, port)
        except zmq.ZMQError as error:
            self._shut()
            why = zmq.strerror(error.errno or 0)
            place, remedy = f" port {port}" if port else "", "another port, or 0 for any free one"
            if isinstance(port, PortRange):
                place = f", any port of {port}"
                remedy = "ports to another range, with free ports from 1024 on"
            if error.errno not in _TAKEN:
                remedy = "host to an address of this machine"
            raise ConfigError(f"{channel}: cannot listen on {host}{place}: {why}; set {remedy}") from error
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

    def serve(
        self,
        name: str,
        answer: Callable[[bytes, bytes], bytes | None],
        *,
        begin: tuple[Callable[[], None], ...] = (),
        each_round: tuple[Callable[[], None], ...] = (),
    ) -> None:
        """Start a thread that answers messages until `close`. An error ends only the call that raised it.

        Args:
            name: name of the thread.
            answer: takes a sender's id and its message, and returns the reply; None for no reply.
            begin: called by the thread before the first message.
            each_round: called by the thread after each message, and at least every `_POLL_SECONDS`.
        """
        self._answer = answer
        self._thread = Thread(partial(self._run, begin, each_round), name)
        self._thread.start()

    def _run(self, begin: tuple[Callable[[], None], ...], each_round: tuple[Callable[[], None], ...]) -> None:
        steps = begin
        while not self._stop:
            for step in steps:
                try:
                    step()
                except KVFerryError as error:
                    self.rejected += 1
                    self._log.say("dropped", f"{self._channel}: dropped a message: {error}")
                except Exception as error:  # noqa: BLE001 - one message must not end the channel for all
                    self._log.say(type(error).__name__, f"{self._channel}: an unexpected error", error)
            due = time.monotonic() + _POLL_SECONDS
            heard = self.wait(_POLL_SECONDS)
            warn_if_late(self._log, f"{self._channel}, listening", due)
            steps = (self._answer_next, *each_round) if heard else each_round
        self._shut()

    def _answer_next(self) -> None:
        sender, data = self.receive()
        if (reply := self._answer(sender, data)) is not None:
            self.send(sender, reply)

    def wait(self, seconds: float) -> bool:
        """Wait for a message, at most `seconds` or until `interrupt`; return whether one has arrived."""
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

    def close(self, patience_seconds: float | None = None) -> None:
        """End the thread that answers, and close the socket. Leave a thread that takes longer running."""
        if self._thread is None:
            self._shut()
            return
        self._stop = True
        self.interrupt()
        self._thread.join(patience_seconds)
        if self._thread.is_alive():
            logger.warning("%s: still busy after %g s, left behind", self._channel, patience_seconds)

    def _shut(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._wake)
        self.connections.close()
        self._socket.close()
        self._door.close()  # last: clients of an open listener need it
        self._context.term()
