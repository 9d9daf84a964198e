"""The state of a router's engines, and the choice of the engine for the next request."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from kvferry.serving.router.sessions import score
from kvferry.serving.router.streaming import StreamSource
from kvferry.serving.router.waits import Waits

_log = logging.getLogger("kvferry.router")

_FIRST_REST_SECONDS = 0.5
_LONGEST_REST_SECONDS = 16.0
_MAX_UNWANTED = 256
"""Largest number of names of unwanted KV that an engine accepts in one request."""


class BackendState(StrEnum):
    """State of an engine as the router knows it, as it is named in metrics.

    A draining engine was removed. It gets no new requests, and still works on some.
    """

    UP = "up"
    RESTING = "resting"
    DOWN = "down"
    DRAINING = "draining"


class Backend:
    """An engine to which the router sends requests, and the engine's state as the router knows it.

    Attributes:
        role: ``prefill`` or ``decode``.
        url: base URL without a trailing slash.
        proven: True once the engine has been up.
        draining: True if the engine was removed from its pool.
        probed: True once a probe of the engine has ended.
        unwanted: names of KV in this prefill engine that no decode engine will read, until a request to the
            engine takes them along.
        waits: waits of requests and of the probe for the engine.
        outstanding: number of this router's requests that the engine is working on.
        losses: number of times that the engine was marked as down. What it had in its cache may be lost.
        last_used: number of the last request to the engine; 0 if there was none. The `Pool` numbers the
            requests to all its engines consecutively from 1.
    """

    def __init__(self, role: str, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self._clock = clock
        self.url = url
        self.proven = False
        self.draining = False
        self.probed = False
        self.unwanted: deque[str] = deque(maxlen=_MAX_UNWANTED)
        self.waits = Waits()
        self.outstanding = 0
        self.losses = 0
        self.last_used = 0
        self._fault: str | None = None
        self._rests, self._rests_until = 0, 0.0
        self._hands_over = True
        self._source: StreamSource | None = None
        self._same, self._varies = 0, False

    @property
    def up(self) -> bool:
        """Whether the router may send requests to the engine. An engine is not up before a good probe."""
        return self.proven and self._fault is None

    @property
    def reason(self) -> str | None:
        """Reason why the engine is not up; None if it is up."""
        return self._fault or (None if self.proven else "it has not answered /health yet")

    @property
    def stream_source(self) -> StreamSource | None:
        """The engine behind this URL, if its KV can be read while it computes a prompt; None otherwise.

        Also None until the URL has answered twice, and if different engines have answered: the engine that
        answers next is then unknown.
        """
        return self._source if self._same > 1 and not self._varies else None

    @property
    def resting(self) -> bool:
        """Whether the engine refused its last request so recently that other engines are preferred."""
        return self._clock() < self._rests_until

    @property
    def state(self) -> BackendState:
        """Whether the engine was removed, is down, rests, or gets requests."""
        if self.draining:
            return BackendState.DRAINING
        if not self.up:
            return BackendState.DOWN
        return BackendState.RESTING if self.resting else BackendState.UP

    def back_off(self) -> None:
        """Prefer other engines for a while, because this one was busy or answered with a server error.

        The first time is half a second. It doubles with each further refusal, up to 16 s, until
        `note_success` is called. The engine stays up: only probes and broken connections mark it as down.
        """
        seconds = min(_FIRST_REST_SECONDS * 2**self._rests, _LONGEST_REST_SECONDS)
        self._rests += 1
        self._rests_until = self._clock() + seconds

    def take_unwanted(self) -> tuple[str, ...]:
        """Return and forget the names of unwanted KV."""
        names = tuple(self.unwanted)
        self.unwanted.clear()
        return names

    def note_success(self) -> None:
        """Record that the engine has answered a request, so that it need not rest."""
        self._rests, self._rests_until = 0, 0.0

    def mark_down(self, reason: str) -> None:
        """Stop sending requests to the engine until `mark_up` is called.

        Args:
            reason: reason why the engine is down, as text.
        """
        if self._fault is None:
            _log.warning("%s engine %s is down: %s", self.role, self.url, reason)
            self.losses += 1
        self._fault = reason
        self._source, self._same, self._varies = None, 0, False  # it may return as another engine

    def mark_up(self) -> None:
        """Send requests to the engine, which has answered."""
        if self._fault is not None:
            _log.warning("%s engine %s is up%s", self.role, self.url, " again" if self.proven else "")
        self.proven, self._fault = True, None
        self.waits.note_alive()

    def note_hand_over(self, params: dict[str, Any] | None) -> bool:
        """Record whether this prefill engine's last answer offered the KV of the prompt to a decode engine.

        A warning is logged when the engine stops offering KV, and when it starts again. An engine that says
        that it has stopped, because an operator drains it, rests for 16 s.

        Args:
            params: ``kv_transfer_params`` of the answer; None if it had none.

        Returns:
            Whether a decode engine can read the KV.
        """
        done, offers = params is not None, False
        if params is not None and params.get("do_remote_prefill"):
            offers = True
            source = StreamSource.of(params)
            self._varies |= self._same > 0 and source != self._source
            self._source, self._same = source, self._same + 1
        else:
            self._source, self._same = None, 0
        if params is not None and params.get("remote_stopped"):
            self._rests_until = self._clock() + _LONGEST_REST_SECONDS
        if done != self._hands_over:
            if done:
                _log.warning("prefill engine %s hands over KV again", self.url)
            else:
                _log.warning(
                    "prefill engine %s answered without kv_transfer_params; is it started with a "
                    "--kv-transfer-config (see kvferry config)?",
                    self.url,
                )
        self._hands_over = done
        return offers


class Pool:
    """The engines of one role (prefill or decode), from which the router chooses one for each request.

    Attributes:
        backends: engines to choose from.
    """

    def __init__(self, role: str, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._role, self._clock = role, clock
        self.backends = tuple(Backend(role, url, clock) for url in urls)
        self._removed: tuple[Backend, ...] = ()
        self._requests = 0

    @property
    def draining(self) -> tuple[Backend, ...]:
        """Removed engines that still work on requests of this router."""
        self._removed = tuple(backend for backend in self._removed if backend.outstanding)
        return self._removed

    def replace(self, urls: Sequence[str]) -> None:
        """Replace the engines. Engines that stay keep their state, and removed ones end their requests.

        Args:
            urls: base URLs of all engines, without a trailing slash.
        """
        known = {backend.url: backend for backend in (*self.backends, *self.draining)}
        before, self.backends = (
            self.backends,
            tuple(known.get(url) or Backend(self._role, url, self._clock) for url in urls),
        )
        for backend in self.backends:
            backend.draining = False
            if backend not in before:
                _log.warning("%s engine %s is added", self._role, backend.url)
        for backend in before:
            if backend not in self.backends:
                backend.draining = True
                _log.warning("%s engine %s is removed", self._role, backend.url)
        self._removed = tuple(backend for backend in known.values() if backend.draining)

    def next(
        self, tried: Sequence[Backend], session: int | None = None, *, last_resort: bool = False
    ) -> Backend | None:
        """Choose the engine for a request from those that are up.

        It is the engine of the request's session, or else the one with the fewest outstanding requests.
        Engines that rest after a refusal are left out. If several engines have equally few requests, the
        least recently used of them is chosen. Return None if there is no engine to choose from.

        Args:
            tried: engines to skip, because this request was already sent to them.
            session: session of the request, as `session_of` returns it; None if it has none.
            last_resort: True to choose from the engines that rest, and then from those that are down, if no
                other engine is left. An engine that has never been up gets no requests.
        """
        left = [backend for backend in self.backends if backend.proven and backend not in tried]
        up = [backend for backend in left if backend.up]
        choice = [backend for backend in up if not backend.resting] or ((up or left) if last_resort else [])
        if session is not None:
            return max(choice, key=lambda backend: score(session, backend.url), default=None)
        return min(choice, key=lambda backend: (backend.outstanding, backend.last_used), default=None)

    @contextmanager
    def count_request(self, backend: Backend) -> Iterator[None]:
        """Count a request to an engine as outstanding until the ``with`` block ends.

        The engine also becomes the most recently used engine of the pool.

        Args:
            backend: engine to which the caller sends the request.
        """
        self._requests += 1
        backend.last_used = self._requests
        backend.outstanding += 1
        try:
            yield
        finally:
            backend.outstanding -= 1
