"""The router's own entry in the Via header of what it sends (RFC 9110, section 7.6.3).

With it, a router recognizes a request that it has forwarded to itself, directly or through other routers.
Otherwise such a loop would use up all file descriptors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from kvferry.serving.router.replies import Headers, Reply, unavailable

LOOP_DETECTED = 508
"""HTTP status "Loop Detected" of RFC 5842."""
_VIA = b"via"


class Hop:
    """A router's identity in Via headers, a random name."""

    def __init__(self) -> None:
        self._name = f"kvferry-{secrets.token_hex(8)}".encode()

    def passed_on(self, headers: Headers = ()) -> Headers:
        """Return these headers with lower-case names and this router added to Via, to send to an engine."""
        before = [value for name, value in headers if name == _VIA]
        others = [(name, value) for name, value in headers if name != _VIA]
        return (*others, (_VIA, b", ".join([*before, b"1.1 " + self._name])))

    def has_seen(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request with these headers, names in lower case, has come from this router."""
        return any(name == _VIA and self._name in value for name, value in headers)


def loop_reply() -> Reply:
    """Return the answer to a request that has come back to this router."""
    return unavailable(
        "this request has come through this router before: one of its engines is the router itself, or a "
        "router that asks it; correct --prefill and --decode",
        "router_loop",
        LOOP_DETECTED,
    )
