"""The router in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from kvferry.serving.ports import listen
from kvferry.serving.router import RouterSettings, router_app

_HOST = "127.0.0.1"


@contextmanager
def routed(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """A router over these engines, for as long as the block runs; yields its URL.

    Raises:
        ConfigError: no engine of a role.
    """
    app = router_app(RouterSettings(tuple(prefill), tuple(decode)))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    sock = listen(_HOST, 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="router", daemon=True)
    thread.start()
    try:
        yield f"http://{_HOST}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
