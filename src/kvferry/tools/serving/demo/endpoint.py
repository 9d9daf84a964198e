"""Run the router in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvferry.tools.serving.ports import listen, url_of
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import run_app


@contextmanager
def routed(prefill: Sequence[str], decode: Sequence[str]) -> Iterator[str]:
    """Run the prefill/decode router in a thread until the ``with`` block ends, and yield its base URL.

    Raises:
        ConfigError: there is no decode engine, or an address is not a URL.
    """
    app = RouterApp(RouterSettings(prefill=tuple(prefill), decode=tuple(decode)))
    sock = listen("127.0.0.1", 0)
    url = url_of(sock)
    ended = threading.Event()

    def serve() -> None:
        try:
            run_app(app, sock, lambda: not ended.is_set())
        except BaseException:
            # An error after `ended` is set comes from stopping the router, so it is not reported.
            if not ended.is_set():
                raise

    thread = threading.Thread(target=serve, name="router")
    thread.start()
    try:
        yield url
    finally:
        ended.set()
        thread.join()
