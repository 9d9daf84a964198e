"""Object storage for tests: a real S3 server, and servers that are not well."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from benchmarks.object_server import ObjectServer, object_server

Answer = bytes | Callable[[bytes], bytes]


@dataclass(frozen=True)
class Server:
    """Where a server listens, and the folder that has its buckets: objects are files in it."""

    port: int
    root: Path = Path("/nowhere")
    key: str = "tests-access"
    secret: str = "tests-secret"

    @property
    def options(self) -> dict[str, str]:
        """What a client needs, as options."""
        return ObjectServer(self.port, self.key, self.secret, self.root).options(self.port)

    @property
    def environment(self) -> dict[str, str]:
        """The same, as environment variables."""
        return {f"AWS_{name.upper()}": value for name, value in self.options.items()}


@contextmanager
def s3(root: Path) -> Iterator[Server]:
    """rclone, serving a folder whose folders are buckets."""
    with object_server(root) as server:
        yield Server(server.port, root, server.key, server.secret)


@contextmanager
def ill(answer: Answer, *, reads_body: bool = True, hangs_up: bool = False) -> Iterator[Server]:
    """A server that gives one answer to whatever it is asked, and then nothing more.

    Args:
        answer: its bytes; or what makes them of a request's head.
        reads_body: whether it reads what it is sent before it answers.
        hangs_up: whether it closes the connection then, or leaves who asked waiting for more.
    """
    open_ones: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    one, _ = listening.accept()
                    open_ones.append(one)
                    threading.Thread(
                        target=_answer, args=(one, answer, reads_body, hangs_up), daemon=True
                    ).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield Server(listening.getsockname()[1])
        finally:
            for one in (listening, *open_ones):
                _shut(one)


class Line:
    """A way to a server that can be cut: while it is, bytes stay where they are.

    Attributes:
        server: the server, by this way.
        whole: set while bytes go through.
    """

    def __init__(self, to: Server) -> None:
        self.whole = threading.Event()
        self.whole.set()
        self._to = to
        self._ends: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.server = replace(to, port=self._listening.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        for one in (self._listening, *self._ends):
            _shut(one)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._to.port))
                self._ends += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.whole.wait()
                sink.sendall(data)
        _shut(sink)


def response(status: str, body: bytes = b"", length: int | None = None) -> bytes:
    """An answer by HTTP, which may promise another length than it has."""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n"
        'ETag: "1"\r\nLast-Modified: Sat, 01 Nov 2025 00:00:00 GMT\r\nConnection: close\r\n\r\n'
    )
    return head.encode() + body


def error(status: str, code: str) -> bytes:
    """An answer of S3's that reports an error."""
    return response(status, f"<Error><Code>{code}</Code><Message>for tests</Message></Error>".encode())


def _answer(one: socket.socket, answer: Answer, reads_body: bool, hangs_up: bool) -> None:
    """Read a request and answer it."""
    with suppress(OSError):
        request = b""
        while b"\r\n\r\n" not in request:
            if not (more := one.recv(1 << 16)):
                return
            request += more
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        left = (int(length[1]) if length and reads_body else 0) - len(body)
        while left > 0:
            left -= len(one.recv(1 << 16)) or left
        said = answer(head) if callable(answer) else answer
        one.sendall(said)
        if hangs_up:
            _shut(one)


def _shut(one: socket.socket) -> None:
    """Close a socket that another thread may be waiting on."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
