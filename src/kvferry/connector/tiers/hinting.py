"""Hints at work: chunks that are retained, prefetched, or cold because requests or operators say so.

A hint is about chunks of its own tenant only (`keys.tenant`), because those of others have other keys. All
that is held because of hints stays within `hint_share` (`cache.retained`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Sized
from functools import partial

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.prefetching import Prefetch, Prefetches
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.cache.retained import RetainedChunks
from kvferry.cache.sessions import SessionName, Sessions, end_session
from kvferry.common.errors import ConfigError, ProtocolError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.common.units import counted
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Prompts
from kvferry.connector.engine import Request
from kvferry.connector.events import EventStream, Hinted, HintKind, HintOutcome, RetainedBytes, short_id
from kvferry.connector.hints import NO_HINTS, Hints, HintSpan, read_hints, session_of
from kvferry.geometry import Group
from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.tenant import tenant_of
from kvferry.planning.select import LoadSpan, windows_survive_load
from kvferry.transport.offer import read_remote_caches
from kvferry.transport.redeem import MAX_TOKENS

logger = logging.getLogger(__name__)

_NO_SHARE = "hint_share is 0"


class Hinting:
    """Applies the hints of requests, and operators' calls. Only the engine's thread calls it."""

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        groups: Sequence[Group],
        canonical: CanonicalForm,
        config: ConnectorConfig,
        events: EventStream,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without hints. `groups` are the engine's KV cache groups, as one rank describes them."""
        self._cache, self._prompts, self._groups, self._canonical = cache, prompts, groups, canonical
        self._events, self._clock, self._most_seconds = events, clock, config.hint_seconds
        self._retained = RetainedChunks(cache.host, config.hint_share, config.weighted_tenants())
        self._prefetches = Prefetches(cache, self._retained, clock)
        self._sessions = Sessions[PromptChunks]()
        self._hints: dict[str, Hints] = {}
        # The request that began each prefetch; none for those of operators.
        self._prefetched_for: dict[Prefetch, str] = {}
        self._told_bytes = 0
        self._log = LimitedLog(logger)

    @property
    def busy(self) -> bool:
        return bool(self._prefetches.waiting)

    @property
    def agenda(self) -> tuple[Sized, ...]:
        return (self._prefetches.waiting,)

    def on_new_request(self, request: Request) -> int:
        """Read the hints of a request, and begin what it asks for. Return how many tokens may be stored."""
        try:
            hints = read_hints(request)
        except ProtocolError as error:
            self._log.say(str(error), f"request {shown(request.request_id)}: {error}")
            self._emit(request.request_id, HintKind.MALFORMED, HintOutcome.IGNORED, str(error))
            return MAX_TOKENS
        if hints is NO_HINTS:
            return MAX_TOKENS
        self._hints[request.request_id] = hints
        stored = hints.stored_tokens(MAX_TOKENS)
        if stored < MAX_TOKENS:
            detail = f"no tier stores the request from token {stored} on."
            self._emit(request.request_id, HintKind.NO_STORE, HintOutcome.APPLIED, detail)
        if hints.prefetch is not None:
            self._prefetch_for(request, hints.prefetch)
        return stored

    def finished(self, request: Request, used: Sequence[bytes]) -> Callable[[], None] | None:
        """Record the chunks of a request that has ended.

        `used` are the keys of its chunks that later prompts need. Return what is to be done when all of them
        are stored; None for nothing.
        """
        hints, session = self._hints.pop(request.request_id, NO_HINTS), session_of(request)
        if hints is NO_HINTS and session is None and not self._sessions:
            return None
        if (chunks := self._prompts.get(request)) is None:
            return None
        prompt = request.num_prompt_tokens
        self._sessions.use(session, chunks.all_keys(prompt), chunks)
        spans, needed = [], set(used)
        for span in hints.retained(self._most_seconds):
            keys = chunks.keys_of_span(span.start, span.end or MAX_TOKENS, prompt)
            spans.append((span, [key for key in keys if key in needed]))
        if not (spans or hints.ends_session):
            return None
        name, tenant = short_id(request.request_id), chunks.keys.tenant

        def apply() -> None:
            for span, keys in spans:
                self._retain(name, tenant, span, keys)
            if hints.ends_session:
                self._end_session_of(name, session)

        return apply

    def poll(self) -> None:
        """Continue prefetches, and give up chunks whose time has passed. Call after `ChunkCache.poll`."""
        self._retained.expire(self._clock())
        if self._prefetches.waiting:
            self._prefetches.poll()
        for prefetch in self._prefetches.ended:
            self._tell_prefetch(prefetch)
        self._prefetches.ended.clear()

    def step_done(self) -> None:
        """Emit an event if the number of retained bytes has changed."""
        if self._retained.used_bytes != self._told_bytes:
            self._told_bytes = self._retained.used_bytes
            self._events.emit(RetainedBytes(time.monotonic(), self._told_bytes))

    def prefetch(self, request: Request) -> tuple[int, int]:
        """Bring the chunks of a prompt to host memory, for an operator. Raise Unnameable.

        Return (number of chunks that tiers have, how many of them are in host memory already).
        """
        chunks = self._prompts.chunks_of(request)
        return self._begin_now(chunks, request.num_tokens)

    def prefetch_session(self, session: SessionName) -> tuple[int, int]:
        """Bring the chunks of a session's last request to host memory, as `prefetch` does."""
        if (last := self._sessions.last(session)) is None:
            raise ConfigError(
                f"no session {shown(session[1])} of this salt is known; name one whose request has ended, by "
                "its session_id, or give the tokens of a prompt"
            )
        return self._begin_now(last, len(last.keys))

    def end_session(self, session: SessionName) -> int:
        """Make the chunks cold that only this session has used. Return their number."""
        return end_session(session, self._sessions, self._retained, self._cache.host)

    def forget_salt(self, salt: str) -> None:
        """Give up what is held for the requests of a cache salt, whose chunks are not found any more."""
        self._retained.release_tenant(tenant_of(salt, None))
        self._sessions.forget_tenant(salt)

    def clear(self) -> None:
        """Give up everything, before host memory is cleared."""
        self._prefetches.clear()
        self._retained.clear()
        self._sessions.clear()

    def _begin_now(self, chunks: PromptChunks, tokens: int) -> tuple[int, int]:
        if not self._retained.most_bytes:
            raise ConfigError(f"{_NO_SHARE}, so nothing is prefetched; set hint_share, 0.1 for instance")
        found = self._loadable(chunks, tokens)
        here = int(self._cache.host.contains([one.key for one in found]).sum()) if found else 0
        self._prefetches.begin(self._prefetch_of(chunks, tokens, ()))
        return len(found), here

    def _prefetch_for(self, request: Request, what: str) -> None:
        name = request.request_id
        if what == "session":
            chunks, unknown = self._sessions.last(session_of(request)), "its session is not known here"
        else:
            chunks, unknown = self._prompts.get(request), self._prompts.why_unnamed(name)
        if chunks is None or not self._retained.most_bytes:
            why = unknown if chunks is None else _NO_SHARE
            self._emit(name, HintKind.PREFETCH, HintOutcome.IGNORED, f"nothing is prefetched: {why}.")
            return
        try:
            named = read_remote_caches(request.kv_transfer_params)
        except ProtocolError:  # its source says so
            named = ()
        prefetch = self._prefetch_of(chunks, len(chunks.keys), named)
        self._prefetched_for[prefetch] = short_id(name)
        self._prefetches.begin(prefetch)

    def _prefetch_of(self, chunks: PromptChunks, tokens: int, engines: Sequence[tuple[str, int]]) -> Prefetch:
        searches = None
        if self._cache.searched is not None:
            searches = self._cache.find(chunks.all_keys(tokens), engines)
        # A look-up changes the object, and the request may have its own under way.
        own = PromptChunks(self._canonical.groups, chunks.keys)
        return Prefetch(
            tenant=chunks.keys.tenant, find=partial(self._loadable, own, tokens), searches=searches or ()
        )

    def _loadable(self, chunks: PromptChunks, tokens: int) -> list[PromptChunk]:
        """Return the chunks of the longest prefix that can be loaded, in the order of the prompt."""
        in_full = windows_survive_load(self._groups, tokens)
        found = chunks.look_up(tokens, 0, self._cache.tier_numbers, in_full=in_full)
        if not found.tokens:
            return []
        return list(chunks.wanted_chunks(found, LoadSpan(0, found.tokens, tokens)))

    def _tell_prefetch(self, prefetch: Prefetch) -> None:
        if (name := self._prefetched_for.pop(prefetch, None)) is None:
            return  # an operator's
        ready, wanted = counted(prefetch.ready, "chunk"), prefetch.wanted
        detail = f"{ready} of {wanted} in host memory{f': {prefetch.why}' if prefetch.why else ''}."
        self._emit(name, HintKind.PREFETCH, _outcome(prefetch.ready, wanted), detail)

    def _retain(self, name: str, tenant: bytes, span: HintSpan, keys: Sequence[bytes]) -> None:
        seconds = span.retain_seconds
        here = int(self._cache.host.contains(keys).sum()) if keys else 0
        done = self._retained.retain(tenant, keys, self._clock() + seconds, span.priority)
        why = ""
        if done < here:
            why = f"; {'the part of its tenant is full' if self._retained.most_bytes else _NO_SHARE}"
        detail = f"{counted(done, 'chunk')} of {here} in host memory retained for {seconds:g} s{why}."
        self._emit(name, HintKind.RETAIN, _outcome(done, here), detail)

    def _end_session_of(self, name: str, session: SessionName | None) -> None:
        if session is None:
            detail = "the request has no session_id."
            self._emit(name, HintKind.END_SESSION, HintOutcome.IGNORED, detail)
            return
        done = self.end_session(session)
        detail = f"{counted(done, 'chunk')} of the session alone will be evicted first."
        self._emit(name, HintKind.END_SESSION, HintOutcome.APPLIED, detail)

    def _emit(self, request_id: str, hint: HintKind, outcome: HintOutcome, detail: str) -> None:
        self._events.emit(Hinted(request_id, time.monotonic(), hint, outcome, detail))


def _outcome(done: int, of: int) -> HintOutcome:
    if not done:
        return HintOutcome.IGNORED
    return HintOutcome.APPLIED if done >= of else HintOutcome.PARTIAL
