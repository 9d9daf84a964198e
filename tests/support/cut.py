"""A server between a client and another server, which cuts a connection in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_REQUEST = b"POST /v1/"


class Cutter:
    """Passes bytes on in both directions.

    Attributes:
        url: where it listens.
        after: number of bytes of the answer to the next POST request after which the connection ends, once;
            None to pass on everything.
        passed: number of bytes of the answer to the last POST request.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self.after: int | None = None
        self.passed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._server.accept()
                engine = socket.create_connection(self._target)
                answering = threading.Event()  # set while the connection answers such a request
                for one, other in ((client, engine), (engine, client)):
                    of = one, other, answering, one is client
                    threading.Thread(target=self._pass, args=of, daemon=True).start()

    def _pass(
        self, source: socket.socket, target: socket.socket, answering: threading.Event, is_client: bool
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_client and data.startswith(_REQUEST):
                    self.passed = 0
                    answering.set()
                elif is_client and data.startswith((b"GET ", b"POST ")):
                    answering.clear()
                elif not is_client and answering.is_set():
                    self.passed += len(data)
                    if self.after is not None and self.passed >= self.after:
                        target.sendall(data[: len(data) - (self.passed - self.after)])
                        self.after = None
                        break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
