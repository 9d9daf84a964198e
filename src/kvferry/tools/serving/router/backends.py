"""The state of a router's engines, and the choice of the engine for the next request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any

import xxhash

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.replies import Headers

_log = logging.getLogger("kvferry.router")

_SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("prompt_cache_key", "user")
# Parameters of an offer that say which engine to read from.
_IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
_FIRST_REST_SECONDS = 0.5
_LONGEST_REST_SECONDS = 16.0
# An engine accepts no more names of unwanted KV in one request. Leases of dropped ones expire.
_MAX_UNWANTED = 256
# Numbers of requests, in their order.
_REQUESTS = count(1)


def session_of(headers: Headers, body: dict[str, Any]) -> int | None:
    """Return a 64-bit hash of the name of a request's session; None if it names none.

    The name is the header ``x-session-id``, else the field ``prompt_cache_key``, else the field ``user``.
    """
    name = next((value for name, value in headers if name == _SESSION_HEADER and value), None)
    if name is None:
        fields = (body.get(field) for field in _SESSION_FIELDS)
        text = next((value for value in fields if isinstance(value, str) and value), None)
        if text is None:
            return None
        name = text.encode("utf-8", "surrogatepass")  # JSON may have half of a surrogate pair
    return xxhash.xxh3_64_intdigest(name)


def score(session: int, url: str) -> int:
    """Return the score of an engine for a session: the engine with the highest score serves it.

    >>> urls = ("http://a:1", "http://b:1")
    >>> [max(urls, key=lambda url: score(session, url)) for session in (1, 2, 3)]
    ['http://b:1', 'http://a:1', 'http://b:1']
    """
    return xxhash.xxh3_64_intdigest(session.to_bytes(8, "little") + url.encode())


@dataclass(frozen=True, slots=True)
class StreamSource:
    """A prefill engine whose KV can be read while it computes a prompt."""

    identity: tuple[tuple[str, Any], ...]  # the parameters of an offer that say which engine to read from
    # Number of tokens of a prompt that the engine computes in one step. Only the KV of longer prompts can be
    # read before the end.
    step_tokens: int

    @classmethod
    def of(cls, params: dict[str, Any]) -> StreamSource | None:
        """Return the engine that made an offer; None if its KV can only be read after its last step."""
        step_tokens = params.get("remote_step_tokens")
        if not isinstance(step_tokens, int) or step_tokens < 1 or not params.keys() >= set(_IDENTITY):
            return None
        return cls(tuple((key, params[key]) for key in _IDENTITY), step_tokens)

    def offer(self, ticket: str) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` for the decode engine, with a ticket that both engines get."""
        # How many tokens the KV has is known only at its end.
        named = {"remote_request_id": ticket, "remote_num_tokens": None}
        known = {"remote_step_tokens": self.step_tokens, **dict(self.identity)}
        return {"do_remote_prefill": True, "do_remote_decode": False, **known, **named}


def new_ticket() -> str:
    """Return a new random ticket: 128 bits, as 32 hex digits."""
    return secrets.token_hex(16)


class SilentEngine(Exception):
    """Raised if an engine sent nothing and its probes failed for so long that the wait for it ends."""


class Waits:
    """The waits of all requests, and of the probe, for one engine."""

    def __init__(self) -> None:
        self._now, self._heard = 0, 0
        self._begun: dict[asyncio.Timeout, int] = {}

    def note_alive(self) -> None:
        self._heard = self._now

    def tick(self, limit: int) -> None:
        """Advance the time, and end waits of `limit` ticks or more if the engine was silent for as long."""
        self._now += 1
        if self._now - self._heard < limit:
            return
        for wait, begun in [*self._begun.items()]:
            if self._now - begun >= limit:
                del self._begun[wait]
                wait.reschedule(0.0)  # in the past, so that it ends now

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Wait for the engine's next bytes in the ``with`` block. Raise SilentEngine if it is silent."""
        wait = asyncio.timeout(None)
        self._begun[wait] = self._now
        try:
            async with wait:
                yield
        except TimeoutError:
            if not wait.expired():
                raise
            raise SilentEngine from None
        finally:
            self._begun.pop(wait, None)


class BackendState(StrEnum):
    """State of an engine as it is named in metrics. A draining engine was removed, and still works."""

    UP = "up"
    RESTING = "resting"
    DOWN = "down"
    DRAINING = "draining"


class Backend:
    """An engine to which the router sends requests, and the engine's state as the router knows it.

    Attributes:
        role: what the router uses the engine for. It may change, and requests under way then go on.
        url: base URL without a trailing slash.
        proven: True once the engine has been up.
        probed: True once a probe of the engine has ended.
        unwanted: names of KV in this prefill engine that no decode engine will read, until a request to the
            engine takes them along.
        outstanding: number of this router's requests that the engine is working on.
        losses: number of times that the engine was marked as down. What it had in its cache may be lost.
        last_used: number of the last request to the engine, of those to all engines; 0 if there was none.
    """

    def __init__(self, role: Role, url: str, clock: Callable[[], float] = time.monotonic) -> None:
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

    def __str__(self) -> str:
        return f"engine {self.url}" if self.role is Role.BOTH else f"{self.role} engine {self.url}"

    @property
    def up(self) -> bool:
        """True if the router may send requests to the engine. An engine is not up before a good probe."""
        return self.proven and self._fault is None

    @property
    def reason(self) -> str | None:
        return self._fault or (None if self.proven else "it has not answered /health yet")

    @property
    def stream_source(self) -> StreamSource | None:
        """The engine behind this URL, if its KV can be read while it computes a prompt; None otherwise."""
        # A load balancer may stand behind the URL. Two equal answers, and never a different one, say that the
        # engine that answers next is known.
        return self._source if self._same > 1 and not self._varies else None

    @property
    def resting(self) -> bool:
        """True if the engine refused its last request so recently that other engines are preferred."""
        return self._clock() < self._rests_until

    @property
    def state(self) -> BackendState:
        if self.draining:
            return BackendState.DRAINING
        if not self.up:
            return BackendState.DOWN
        return BackendState.RESTING if self.resting else BackendState.UP

    def back_off(self) -> None:
        """Prefer other engines for half a second, doubled with each further refusal, up to 16 s.

        The engine stays up: only probes and broken connections mark it as down.
        """
        seconds = min(_FIRST_REST_SECONDS * 2**self._rests, _LONGEST_REST_SECONDS)
        self._rests += 1
        self._rests_until = self._clock() + seconds

    def take_unwanted(self) -> tuple[str, ...]:
        names = tuple(self.unwanted)
        self.unwanted.clear()
        return names

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request to the engine as outstanding until the ``with`` block ends."""
        self.last_used = next(_REQUESTS)
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def note_success(self) -> None:
        """Record that the engine has answered a request, so that it need not rest."""
        self._rests, self._rests_until = 0, 0.0

    def mark_down(self, reason: str) -> None:
        """Stop sending requests to the engine until `mark_up` is called."""
        if self._fault is None:
            _log.warning("%s is down: %s", self, reason)
            self.losses += 1
        self._fault = reason
        self._source, self._same, self._varies = None, 0, False  # it may return as another engine

    def mark_up(self) -> None:
        """Send requests to the engine, which has answered."""
        if self._fault is not None:
            _log.warning("%s is up%s", self, " again" if self.proven else "")
        self.proven, self._fault = True, None
        self.waits.note_alive()

    def note_hand_over(self, params: dict[str, Any] | None) -> bool:
        """Record whether this prefill engine's last answer offered KV for a decode engine, and return it.

        A warning is logged when the engine stops offering KV, and when it starts again.
        """
        given, hands_over = params or {}, params is not None
        offers = bool(given.get("do_remote_prefill"))
        if offers:
            source = StreamSource.of(given)
            self._varies |= self._same > 0 and source != self._source
            self._source, self._same = source, self._same + 1
        else:
            self._source, self._same = None, 0
        # An operator drains it, so it will not change its mind soon.
        if given.get("remote_stopped"):
            self._rests_until = self._clock() + _LONGEST_REST_SECONDS
        if hands_over != self._hands_over:
            if hands_over:
                _log.warning("prefill engine %s hands over KV again", self.url)
            else:
                _log.warning(
                    "prefill engine %s answered without kv_transfer_params; is it started with a "
                    "--kv-transfer-config (see kvferry config)?",
                    self.url,
                )
        self._hands_over = hands_over
        return offers


class Pool:
    """The engines that do one thing, prefill or decode, from which the router chooses one for each request.

    Attributes:
        backends: these engines, also those that do both.
    """

    def __init__(self) -> None:
        self.backends: tuple[Backend, ...] = ()

    def next(
        self,
        tried: Sequence[Backend],
        session: int | None = None,
        *,
        cached: Callable[[Backend], int] = lambda _: 0,
        last_resort: bool = False,
    ) -> Backend | None:
        """Choose the engine for a request: that of its session, or else the one with the fewest requests.

        Return None if there is no engine to choose from.

        Args:
            tried: engines to skip, because this request was already sent to them.
            cached: returns how many tokens of the prompt an engine has in host memory. Of the engines with
                the fewest requests, the one with the most is chosen.
            last_resort: True to choose from the engines that rest, and then from those that are down, if no
                other engine is left. An engine that has never been up gets no requests.
        """
        left = [backend for backend in self.backends if backend.proven and backend not in tried]
        up = [backend for backend in left if backend.up]
        choice = [backend for backend in up if not backend.resting] or ((up or left) if last_resort else [])
        if session is not None:
            return max(choice, key=lambda backend: score(session, backend.url), default=None)
        # Of equals, take the one that was idle longest: an idle router would else send everything to the
        # first.
        return min(choice, key=lambda one: (one.outstanding, -cached(one), one.last_used), default=None)


class Engines:
    """The engines of a router, each once, whatever it does.

    Attributes:
        prefill: engines that compute prompts for others.
        decode: engines that generate answers.
    """

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.prefill, self.decode = Pool(), Pool()
        roles = _roles(prefill, decode)
        self._backends = {url: Backend(role, url, clock) for url, role in roles.items()}
        self._choose(prefill, decode)

    @property
    def known(self) -> tuple[Backend, ...]:
        """The engines, also removed ones that still work on requests."""
        return tuple(one for one in self._backends.values() if not one.draining or one.outstanding)

    def replace(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Replace the engines by those with these URLs.

        An engine that stays keeps its state, whether its role changes or not. It gets no new requests of its
        former role, and those under way run to their end, as in an engine that is removed.
        """
        known = {backend.url: backend for backend in self.known}
        self._backends = {}
        for url, role in _roles(prefill, decode).items():
            backend = known.pop(url, None)
            if backend is None or backend.draining:
                backend = backend or Backend(role, url, self._clock)
                backend.role, backend.draining = role, False
                _log.warning("%s is added", backend)
            elif backend.role is not role:
                _log.warning("engine %s changes its role from %s to %s", url, backend.role, role)
                backend.role = role
            self._backends[url] = backend
        for url, backend in known.items():
            if not backend.draining:
                _log.warning("%s is removed", backend)
            backend.draining = True
            self._backends[url] = backend
        self._choose(prefill, decode)

    def _choose(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.prefill.backends = tuple(self._backends[url] for url in prefill)
        self.decode.backends = tuple(self._backends[url] for url in decode)


def _roles(prefill: Sequence[str], decode: Sequence[str]) -> dict[str, Role]:
    roles = {**dict.fromkeys(prefill, Role.PREFILL), **dict.fromkeys(decode, Role.DECODE)}
    return {**roles, **{url: Role.BOTH for url in prefill if url in decode}}
