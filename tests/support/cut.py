"""A server between a client and another server, which cuts a connection in the middle of an answer."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

_REQUEST = b"POST /v1/"
_EVENT = re.compile(rb"data: .*?\n\n", re.DOTALL)
_LAST_TEXT = b'"finish_reason":"'


def in_event(number: int, part: float) -> Callable[[bytes], int | None]:
    """Return a place to cut a stream of events: in this one, or in the last one with text if that is sooner.

    A busy machine has several tokens in an event, and so fewer events.

    Args:
        number: from 0.
        part: share of the event that comes before the cut.
    """

    def place(answer: bytes) -> int | None:
        for at, event in enumerate(_EVENT.finditer(answer)):
            if at == number or _LAST_TEXT in event[0]:
                return event.start() + int(part * len(event[0]))
        return None

    return place


class Cutter:
    """Passes bytes on in both directions.

    Attributes:
        url: where it listens.
        place: returns where the answer to the next POST request is cut, once, of what has come of it; None if
            that is further on. None to pass on everything.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self.place: Callable[[bytes], int | None] | None = None
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
        passed = b""  # of the answer
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_client and data.startswith((b"GET ", b"POST ")):
                    (answering.set if data.startswith(_REQUEST) else answering.clear)()
                elif not is_client and answering.is_set() and self.place is not None:
                    if (at := self.place(passed + data)) is not None:
                        target.sendall(data[: max(at - len(passed), 0)])
                        self.place = None
                        break
                    passed += data
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
