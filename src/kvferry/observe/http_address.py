"""Addresses of engines and routers, as users write them."""

from __future__ import annotations

from urllib.parse import urlsplit


def http_address(text: str) -> str | None:
    """Return the base URL in `text`, without ``/v1`` or ``/metrics``; None if the text is not an HTTP URL.

    >>> [http_address(text) for text in ("http://127.0.0.1:8000/metrics", "https://a.b/one/v1/", "a:1")]
    ['http://127.0.0.1:8000', 'https://a.b/one', None]
    """
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").strip(".").encode("idna")  # as the resolver does
        if parts.scheme not in ("http", "https") or not host or parts.port == 0:
            return None
    except ValueError:  # unmatched brackets, a port that is not a number, an empty or long label
        return None
    # Users copy the address of the API, or the one that Prometheus scrapes.
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def server_url(text: str) -> str | None:
    """Return the base URL of an HTTP server that a user names by a URL, or by host and port alone.

    >>> [server_url(text) for text in ("https://a.b/v1", "a:8000", "[::1]:8000", "a")]
    ['https://a.b', 'http://a:8000', 'http://[::1]:8000', None]
    """
    if "://" in text:
        return http_address(text)
    try:
        # A name alone is more likely a mistake than a server at port 80.
        has_port = urlsplit(f"//{text}").port is not None
    except ValueError:
        return None
    return http_address(f"http://{text}") if has_port else None
