"""Detect request loops with the Via header (RFC 9110, section 7.6.3).

A router adds its own entry to Via in every request to an engine. So it recognizes a request that it has
forwarded to itself, directly or through other routers. Without this, a loop would use up all file
descriptors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from kvferry.tools.serving.router.replies import ApiError, Headers

# RFC 5842.
LOOP_DETECTED = 508
# Why an engine is down that answers with `LOOP_DETECTED`.
LOOP_REASON = "it is this router itself, or a router that asks it"
_VIA = b"via"


class Hop:
    """The entry that a router adds to the Via header of each request to an engine: its random name."""

    def __init__(self) -> None:
        self._name = f"kvferry-{secrets.token_hex(8)}".encode()

    def passed_on(self, headers: Headers = ()) -> Headers:
        """Return `headers` with this router's entry added to Via. Names are in lower case."""
        before = [value for name, value in headers if name == _VIA]
        others = [(name, value) for name, value in headers if name != _VIA]
        return (*others, (_VIA, b", ".join([*before, b"1.1 " + self._name])))

    def has_seen(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request with these headers was already forwarded by this router."""
        return any(name == _VIA and self._name in value for name, value in headers)


LOOP = ApiError(
    LOOP_DETECTED,
    "this request has come through this router before: one of its engines is the router itself, or a "
    "router that asks it; correct --prefill and --decode",
    "router_loop",
)
