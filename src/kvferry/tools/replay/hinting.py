"""Hints in one simulated engine: chunks that are retained, prefetched or evicted first.

What is retained, prefetched and evicted first is decided by the code that serves (`cache.retained`,
`cache.prefetching`, `cache.sessions`). A prefetch brings what its tiers deliver before the next turn arrives,
all at once when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvferry.cache import Fetch, Prefetch, Prefetches, PromptChunk, RetainedChunks, Sessions, end_session
from kvferry.connector import Hints
from kvferry.tiers import Tenants
from kvferry.tools.replay.content import RequestKeys, tenant_digest
from kvferry.tools.replay.hints import HintSetting, SessionName, session_name
from kvferry.tools.replay.lookup import SimulatedTier, look_up
from kvferry.tools.replay.settings import ServedModel
from kvferry.tools.replay.tiers import SimulatedTiers
from kvferry.tools.replay.trace.base import TraceRequest


class _Reads:
    """Reads of one engine from its slow tiers, which end at once: a `FetchingCache`."""

    def __init__(self, tiers: SimulatedTiers) -> None:
        self._tiers = tiers

    @property
    def host(self) -> SimulatedTier:
        return self._tiers.host

    def fetch(self, wanted_chunks: Iterable[PromptChunk]) -> Fetch:
        fetched = Fetch()
        for chunk in wanted_chunks:
            self._tiers.bring(chunk.key, chunk.group)
            if (slot := self.host.hold(chunk.key)) is None:
                fetched.failure = "host memory has no room"
                break
            fetched.ready.append((chunk, slot))
        return fetched

    def cancel(self, fetch: Fetch) -> None:
        for _, slot in fetch.take():
            self.host.close(slot)


class EngineHints:
    """One engine's response to hints.

    Attributes:
        retained: chunks that are retained or were prefetched lately.
        most_retained: maximum bytes of these so far.
    """

    def __init__(
        self,
        model: ServedModel,
        tiers: SimulatedTiers,
        setting: HintSetting,
        tenants: Tenants | None,
        speeds: Sequence[float],
    ) -> None:
        """Begin without hints. `speeds` are those of the tiers in bytes per second, host memory first."""
        self.retained, self.most_retained = RetainedChunks(tiers.host, setting.share, tenants), 0
        self._model, self._tiers, self._speeds = model, tiers, speeds
        self._most_seconds, self._knows_sessions = setting.most_seconds, setting.needs_sessions
        # Keys of a session's last request, and the number of its tokens to look up.
        self._sessions = Sessions[tuple[RequestKeys, int]]()
        self._now = 0.0
        self._prefetches = Prefetches(_Reads(tiers), self.retained, lambda: self._now)

    def set_time(self, now: float) -> None:
        """Give up the chunks whose time has passed. `now` is in seconds since the start of the trace."""
        self._now = now
        self.retained.expire(now)

    def finished(self, request: TraceRequest, hints: Hints, keys: RequestKeys, used: Sequence[bytes]) -> None:
        """Apply the hints of a request whose chunks are stored, as `connector.tiers.hinting` does.

        Args:
            used: keys of its chunks that later prompts need.
        """
        name, tenant = session_name(request), tenant_digest(request.tenant)
        prompt = request.prompt_tokens if self._model.state is None else 0
        if self._knows_sessions:
            size, tokens = keys.chunk_tokens, request.prompt_tokens + request.output_tokens
            # An engine looks all tokens up, so it finds no tail of the prompt if there is an answer.
            if keys.known_tokens // size < tokens // size:
                tokens = keys.known_tokens // size * size
            self._sessions.use(name, keys.in_order(prompt), (keys, tokens))
        needed = set(used)
        for span in hints.retained(self._most_seconds):
            some = keys.of_span(span.start, span.end or keys.known_tokens, prompt)
            until = self._now + span.retain_seconds
            self.retained.retain(tenant, [key for key in some if key in needed], until, span.priority)
        if hints.ends_session:
            end_session(name, self._sessions, self.retained, self._tiers.host)
        self._count()

    def prefetch(self, name: SessionName, seconds: float) -> None:
        """Bring the chunks of a session's last request to host memory, as many as tiers read meanwhile."""
        last = self._sessions.last(name)
        if last is None or not self.retained.most_bytes:
            return
        find = partial(self._readable, *last, seconds)
        self._prefetches.begin(Prefetch(tenant=tenant_digest(name[0]), find=find))
        while self._prefetches.waiting:
            self._prefetches.poll()
        self._prefetches.ended.clear()
        self._count()

    def _readable(self, keys: RequestKeys, tokens: int, seconds: float) -> list[PromptChunk]:
        """Return the first chunks of a prompt that tiers have and can read in a time."""
        tiers, found = self._tiers.tiers, list[PromptChunk]()
        if (coverage := look_up(self._model, tiers, tokens, keys, 0)) is None:
            return found
        left = [speed * seconds for speed in self._speeds]
        for number, (key, group, tier) in enumerate(zip(*coverage.wanted, strict=True)):
            left[tier] -= tiers[tier].chunk_bytes[group] * (tier > 0)
            if left[tier] < 0:
                break
            found.append(PromptChunk(group, number, key, 0))
        return found

    def _count(self) -> None:
        self.most_retained = max(self.most_retained, self.retained.used_bytes)
