"""A way to an object server on which the n-th request goes wrong.

A fault holds for that request and whenever it is repeated, or for the one time alone: the client repeats
what failed.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.object_server import Server, error, response


class How(Enum):
    """What becomes of a request."""

    REFUSED = "not done, and answered with an error"
    DONE_REFUSED = "done, and answered with an error"
    BROKEN = "not done, and not answered"
    DONE_BROKEN = "done, and not answered"
    CUT = "done, and half of the answer comes"
    PAGE = "not done, and answered with a page"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which request.

    Attributes:
        at: number of the request, from 1 on; 0 for none.
        how: what becomes of it.
        answer: status and code of an error.
        once: not when it is repeated.
    """

    at: int = 0
    how: How = How.REFUSED
    answer: tuple[str, str] = ("500 Oops", "InternalError")
    once: bool = False

    def __str__(self) -> str:
        return f"{self.at} {self.how.name} {self.answer[0]}{' once' if self.once else ''}"


@dataclass
class Between:
    """Requests as they pass.

    Attributes:
        server: the server, by this way.
        fault: of what comes now.
        lines: method and path of all requests since the fault was set.
        hit: how often the fault happened.
    """

    server: Server
    fault: Fault = Fault()
    lines: list[str] = field(default_factory=list)
    hit: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, fault: Fault) -> None:
        """Count anew, to this fault."""
        with self.lock:
            self.fault, self.lines, self.hit = fault, [], 0

    def fault_of(self, line: str) -> How | None:
        """What becomes of the request that has just come."""
        with self.lock:
            self.lines.append(line)
            at, here = self.fault.at, len(self.lines)
            if not 0 < at <= here or line != self.lines[at - 1] or (self.fault.once and here > at):
                return None
            self.hit += 1
            return self.fault.how


@contextmanager
def between(to: Server) -> Iterator[Between]:
    """Pass requests on to a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            how = way.fault_of(f"{self.command} {self.path.partition('?')[0]}")
            self.close_connection = how is not None
            if how is How.REFUSED:
                self.wfile.write(error(*way.fault.answer))
            elif how is How.PAGE:
                self.wfile.write(response("200 OK", b"<!doctype html><html>Please log in</html>"))
            elif how is not How.BROKEN:
                self.forward(body, how)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one  # noqa: N815 - names of http.server

        def forward(self, body: bytes, how: How | None) -> None:
            there = http.client.HTTPConnection("127.0.0.1", to.port, timeout=20)
            there.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                there.putheader(name, value)
            there.endheaders(body)
            found = there.getresponse()
            data, head = found.read(), dict(found.getheaders())
            there.close()
            if how is How.DONE_REFUSED:
                self.wfile.write(error(*way.fault.answer))
            if how in (How.DONE_REFUSED, How.DONE_BROKEN):
                return
            length = head.get("Content-Length") if self.command == "HEAD" else None
            kept = {
                n: v
                for n, v in head.items()
                if n not in ("Transfer-Encoding", "Content-Length", "Connection")
            }
            said = [f"HTTP/1.1 {found.status} {found.reason}"]
            said += [f"{n}: {v}" for n, v in {**kept, "Content-Length": length or len(data)}.items()]
            answer = "\r\n".join([*said, "", ""]).encode() + data
            self.wfile.write(answer[: -(-len(answer) // 2)] if how is How.CUT else answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        way = Between(replace(to, port=listening.server_address[1]))
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield way
        finally:
            listening.shutdown()
            thread.join()
