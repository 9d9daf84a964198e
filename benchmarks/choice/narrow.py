"""A TCP relay that limits the speed of a server's answers.

A thread per connection forwards the server's bytes in pieces. A piece is delayed until the time to transmit
it, after all earlier pieces of any connection, has passed. Requests to the server are not delayed.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self

_PIECE_BYTES = 32 << 10


class NarrowRelay:
    """A relay in threads of this process. Leaving the context manager ends it.

    Attributes:
        port: port on the loopback address.
        bytes_per_second: limit for all connections together. It may be changed at any time.
    """

    def __init__(self, port: int, bytes_per_second: float = float("inf")) -> None:
        """Start listening.

        Args:
            port: port of the server on this machine.
            bytes_per_second: limit for the server's answers.
        """
        self.bytes_per_second = bytes_per_second
        self._to, self._ends = port, list[socket.socket]()
        self._free, self._turn = 0.0, threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, name="bench-narrow", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._ends):
            _shut(one)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [here, there]
                for source, sink, paced in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass, args=(source, sink, paced), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, paced: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if paced:
                    time.sleep(self._wait(len(data)))
                sink.sendall(data)
        _shut(sink)

    def _wait(self, size: int) -> float:
        """Reserve time to transmit `size` more bytes, and return the seconds until they may be sent."""
        with self._turn:
            now = time.monotonic()
            self._free = max(now, self._free) + size / self.bytes_per_second
            return self._free - now


def _shut(one: socket.socket) -> None:
    """Close a socket, also if another thread is waiting for data on it."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
