"""A narrow line passes everything on, no faster than it is wide."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.choice.narrow import NarrowRelay

CONTENT = bytes(range(256)) * 2048


@contextmanager
def server() -> Iterator[int]:
    """Reads a byte and answers with all of `CONTENT`, on every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(2):
                one, _ = listening.accept()
                with one:
                    one.recv(1)
                    one.sendall(CONTENT)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


def fetch(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"?")
        return b"".join(iter(lambda: one.recv(1 << 16), b""))


def test_two_connections_share_its_width() -> None:
    with server() as port, NarrowRelay(port, bytes_per_second=10e6) as line:
        found = list[bytes]()
        threads = [threading.Thread(target=lambda: found.append(fetch(line.port))) for _ in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        took = time.monotonic() - began
    assert found == [CONTENT, CONTENT]
    assert took >= 0.99 * 2 * len(CONTENT) / 10e6
