"""Detect request loops with the Via header (RFC 9110, section 7.6.3).

A router adds its own entry to Via in every request to an engine. So it recognizes a request that it has
forwarded to itself, directly or through other routers. Without this, a loop would use up all file
descriptors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from kvferry.serving.router.replies import ApiError, Headers

LOOP_DETECTED = 508
"""HTTP status "Loop Detected" of RFC 5842."""
LOOP_REASON = "it is this router itself, or a router that asks it"
"""Reason why an engine is down that answers with `LOOP_DETECTED`."""
_VIA = b"via"


class Hop:
    """The entry that a router adds to the Via header of each request to an engine.

    The entry contains a random name of the router. If a request arrives with this name in its Via header, it
    has already passed through the router. This happens if the address of an engine leads back to the router.
    """

    def __init__(self) -> None:
        self._name = f"kvferry-{secrets.token_hex(8)}".encode()

    def passed_on(self, headers: Headers = ()) -> Headers:
        """Return the headers of a request to an engine: `headers` with this router's entry added to Via.

        Args:
            headers: (name, value) pairs, with names in lower case.
        """
        before = [value for name, value in headers if name == _VIA]
        others = [(name, value) for name, value in headers if name != _VIA]
        return (*others, (_VIA, b", ".join([*before, b"1.1 " + self._name])))

    def has_seen(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request with these headers was already forwarded by this router.

        Args:
            headers: (name, value) pairs, with names in lower case.
        """
        return any(name == _VIA and self._name in value for name, value in headers)


LOOP = ApiError(
    LOOP_DETECTED,
    "this request has come through this router before: one of its engines is the router itself, or a "
    "router that asks it; correct --prefill and --decode",
    "router_loop",
)
"""Error for a request that was already forwarded by this router."""
