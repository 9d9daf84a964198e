"""The stream of events: whoever decides tells it, readers listen.

Telling is a call of every listener, in the thread that decides. A listener that raises is dropped, and that
is logged: nothing that is seen of a request changes what becomes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from kvferry.observe.events import Event

logger = logging.getLogger(__name__)

Listener: TypeAlias = Callable[[Event], None]


class Watch:
    """The listeners of one engine. Not thread-safe: the engine's thread tells and adds."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        """From now on it hears everything."""
        self._listeners.append(listener)

    def tell(self, event: Event) -> None:
        """Something has happened."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "%r failed at %r and hears nothing more: what it shows stands still, requests are served "
                    "as before; tell kvferry's authors",
                    listener, event,
                )  # fmt: skip
