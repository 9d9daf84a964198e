"""The stream of events: whoever decides tells it, readers listen.

Telling is a call of every listener, in the thread that decides. A listener that raises is dropped, and that
is logged: nothing that is seen of a request changes what becomes of it. Listeners never see a long id: it is
cut here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeAlias

from kvferry.observe.events import Event, brief
from kvferry.terminal import shown

logger = logging.getLogger(__name__)
_SHOWN = 1000

_P = ParamSpec("_P")

Listener: TypeAlias = Callable[[Event], None]


def harmless(tell: Callable[_P, None]) -> Callable[_P, None]:
    """Of what tells: an error in it is logged, the first time, and ends there."""
    said = False

    @wraps(tell)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal said
        try:
            tell(*args, **kwargs)
        except Exception:
            if not said:
                logger.exception("%s could not be told; tell kvferry's authors", tell.__qualname__)
            said = True

    return told


class Watch:
    """The listeners of one engine. Not thread-safe: the engine's thread tells and adds."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)

    def add(self, listener: Listener) -> None:
        """From now on it hears everything."""
        self._listeners.append(listener)

    def tell(self, event: Event) -> None:
        """Something has happened."""
        event = brief(event)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                self._listeners.remove(listener)
                logger.exception(
                    "%r failed at %s and hears nothing more: what it shows stands still, requests are served "
                    "as before; tell kvferry's authors",
                    listener, shown(repr(event), _SHOWN),
                )  # fmt: skip
