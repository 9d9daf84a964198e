"""The source that loads KV from this engine's tiers: host memory, files, object stores.

A load fetches chunks into slots of host memory. As they arrive, ranks copy them to their KV blocks (`feed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache, Fetch
from kvferry.cache.prompt_chunks import PromptChunks
from kvferry.common.errors import ProtocolError
from kvferry.common.units import counted
from kvferry.connector.bids import Bid, PlaceTokens, Speeds
from kvferry.connector.content import Prompts, tenant_of_request
from kvferry.connector.engine import Request
from kvferry.connector.events import EventStream, GroupBytes, MissReason, SourceMiss
from kvferry.connector.messages import Load, LoadOrder, LoadPart, Piece, StepReports
from kvferry.connector.source import Answer
from kvferry.geometry import Group
from kvferry.geometry.canonical import CanonicalForm
from kvferry.geometry.canonical.derive import content_alignment
from kvferry.planning.coverage import NO_TIER, Coverage, widest_group
from kvferry.planning.select import windows_survive_load
from kvferry.tiers.host.settings import HostMissReason
from kvferry.tiers.host.tier import Slot
from kvferry.tiers.names import FLEET, HOST, TIERS, GetOutcome
from kvferry.tiers.storage_tier import KeySearch
from kvferry.tiers.tenants import Tenants
from kvferry.transport.offer import read_remote_caches
from kvferry.transport.read_plan import Report

_COPIED = "copied"
"""Transfer strategy reported for chunks. Loads from peers report their own strategies."""

_SEARCH = "other engines"
"""Name of the source of a bid while it is searched for chunks."""

_MISSES = {
    GetOutcome.BUSY: MissReason.BUSY,
    GetOutcome.LATE: MissReason.DEADLINE,
    GetOutcome.ABSENT: MissReason.EVICTED,
    GetOutcome.CORRUPT: MissReason.CHECKSUM,
    GetOutcome.OTHER_SHAPE: MissReason.CHECKSUM,
}

_REMEMBERED = {HostMissReason.EVICTED: MissReason.EVICTED, HostMissReason.FILLING: MissReason.STORING}


@dataclass(slots=True)
class _CopiedPart:
    """A part of a load whose chunks ranks copy to KV blocks, with their merged report so far."""

    slots: Sequence[Slot]
    report: Report | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _ChunkFeed:
    """Orders the parts of one load of chunks. Chunks that have arrived since the last step are one part."""

    load: Load
    tenant: bytes
    fetch: Fetch
    cache: ChunkCache
    # Tiers that are not used again for the request. Mutated if reads fail or are late.
    excluded_tiers: set[str]
    events: EventStream
    labels: Sequence[str]
    # Feeds of the source by key of the orders that ranks carry out. Mutated.
    feed_of: dict[str, _ChunkFeed]
    # Parts that ranks copy, by key of the order.
    copying: dict[str, _CopiedPart] = field(default_factory=dict)
    parts: int = 0
    told: bool = False  # True if the ranks know the end of the load, or need not know it
    # End of the load, for the ranks; None while chunks are read, or wait to be copied.
    end: LoadPart | None = None
    # Bytes that ranks have copied, by index of the KV cache group.
    sizes: Counter[int] = field(default_factory=Counter)
    cause: MissReason = MissReason.FAILED

    @property
    def busy(self) -> bool:
        return not self.told or bool(self.copying)

    @property
    def origin(self) -> str:
        return self.cache.origin(self.fetch)

    def next_parts(self) -> Sequence[LoadPart]:
        parts = []
        if self.end is None:
            if ready := self.fetch.take():
                pieces = [Piece(wanted.group, wanted.number, slot.offset) for wanted, slot in ready]
                pieces.sort(key=lambda piece: (piece.group, piece.number))
                self.parts += 1
                key = f"{self.load.key}/{self.parts}"
                self.copying[key], self.feed_of[key] = _CopiedPart([slot for _, slot in ready]), self
                parts.append(LoadPart(self.load.key, LoadOrder(key, tuple(pieces), first=self.parts == 1)))
            if self.fetch.over:
                self.excluded_tiers |= self.fetch.failed
                self.stop(self.fetch.failure)
        if self.end is not None:
            parts.append(self.end)
            self.told = True
        return parts

    def stop(self, failure: str | None) -> None:
        """Read nothing more, and tell the ranks the end, unless the feed has stopped already.

        `failure` says why chunks are missing; None if none is.
        """
        if self.end is None:
            self.cache.cancel(self.fetch)
            if self.fetch.miss is not None:
                self.cause = _MISSES.get(self.fetch.miss, self.cause)
            self.end = LoadPart(self.load.key, None, last=failure is None, failure=failure)

    def drop(self) -> None:
        # Chunks that arrive later stay in host memory.
        self.stop("nobody waits for it any more")

    def take_report(self, key: str, report: Report, workers: int) -> _CopiedPart | None:
        """Merge a report into that of its part. Return and forget a part that all have copied."""
        part = self.copying[key]
        part.report = report if part.report is None else part.report.with_other(report)
        if part.report.workers < workers:
            return None
        self.sizes.update(dict(enumerate(part.report.figures.bytes_by_group)))
        del self.feed_of[key]
        return self.copying.pop(key)

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        return tuple(
            GroupBytes(self.labels[number], _COPIED, size)
            for number, size in sorted(self.sizes.items())
            if size
        )

    def miss(self, report: Report) -> MissReason:
        return MissReason.DEADLINE if report.late else self.cause

    def ended(self, report: Report, *, wanted: bool) -> None:
        if wanted and report.failure is not None:
            self.events.refuse(self.load.request_id, TIERS, report.failure)
            # Before the end, chunks were still awaited: their tiers were too slow. After it, the ranks were.
            if report.late and self.end is None:
                self.excluded_tiers |= self.cache.awaited_tiers(self.fetch)
        self.stop(report.failure)
        self.told = True


@dataclass(slots=True)
class _TierRequest:
    """The state of a request whose KV the tiers may hold."""

    tenant: bytes
    # Engines that the request names, which may have its chunks in host memory.
    hints: Sequence[tuple[str, int]] = ()
    # Tiers from which a read for this request failed or missed its deadline.
    excluded_tiers: set[str] = field(default_factory=set)
    # Result of the last look-up of the request's chunks; None before the first.
    coverage: Coverage | None = None
    # Searches for its chunks; None before the first look-up.
    searches: Sequence[KeySearch] | None = None


class TierSource:
    """The source that loads KV from this engine's tiers. Only the engine's thread calls it."""

    name = TIERS

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        groups: tuple[Group, ...],
        canonical: CanonicalForm,
        events: EventStream,
        *,
        workers: int,
        most_loads: int,
        tenants: Tenants | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        """Create the source. It has no requests yet.

        Args:
            groups: the engine's KV cache groups, as one rank describes them.
            most_loads: maximum number of concurrent loads.
            tenants: share this number by weight; None to give a load to whoever asks first.
            speeds: measured speeds of the tiers, if the source policy estimates times. A chunk is then read
                from the tier that is expected to be the fastest, and there are also bids for shorter prefixes
                that need no chunk of the slowest tiers. None to read in the order of the configuration.
        """
        self._cache, self._prompts, self._groups, self._events = cache, prompts, groups, events
        self._workers, self._most_loads, self._speeds = workers, most_loads, speeds
        self._tenants = tenants
        self._labels, self._widest_group = canonical.labels, widest_group(canonical.groups)
        self._alignments = tuple([content_alignment(one, canonical.chunk_tokens) for one in groups])
        self._requests: dict[str, _TierRequest] = {}
        self._feeds: list[_ChunkFeed] = []
        self._feed_of: dict[str, _ChunkFeed] = {}

    @property
    def busy(self) -> bool:
        return any(feed.busy for feed in self._feeds)

    def arrived(self, request: Request, excluded: dict[str, str]) -> bool:
        if self._prompts.add(request) is None and not self._prompts.are_pending(request.request_id):
            return False
        self._requests[request.request_id] = _TierRequest(tenant_of_request(request), self._hints(request))
        return True

    def _hints(self, request: Request) -> Sequence[tuple[str, int]]:
        if self._cache.searched is None:
            return ()
        try:
            return read_remote_caches(request.kv_transfer_params)
        except ProtocolError as error:
            self._events.refuse(request.request_id, TIERS, str(error))
            return ()

    def declined(self, request: Request) -> SourceMiss | None:
        return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))

    def ask(self, request: Request, local_tokens: int) -> Answer:
        """Return what the tiers offer. The first bid is for the longest prefix."""
        chunks, state = self._prompts.get(request), self._requests[request.request_id]
        state.coverage = found = None
        searching = False
        if chunks is not None:
            if self._speeds is not None:
                missing = request.num_tokens - local_tokens
                self._cache.rank(partial(self._speeds.load_seconds, tokens=missing))
            if state.searches is None:
                state.searches = ()
                if self._cache.searched is not None:
                    state.searches = self._cache.find(chunks.all_keys(request.num_tokens), state.hints)
            # Before the look-up, which may miss what a search finds meanwhile.
            searching = not all(one.over for one in state.searches)
            state.coverage = found = chunks.look_up(
                request.num_tokens,
                local_tokens,
                partial(self._cache.tier_numbers, without=state.excluded_tiers),
                in_full=windows_survive_load(self._groups, request.num_tokens),
            )
        bids = self._bids(request, found, local_tokens)
        if searching:
            # First: it wins if its value is equal, and the request waits only if that is expected to pay.
            bids = *self._search_bid(request, bids, local_tokens), *bids
        # A further load would wait for those under way. So there is no bid, not even one that is `looking`:
        # the request is not to wait for the tiers.
        busy = bool(bids) and not self._may_begin(state.tenant)
        bids = () if busy else bids
        tenant = state.tenant
        why_none = partial(self._why_none, request.request_id, tenant, chunks, found, busy=busy)
        if found is None:
            return Answer(bids, why_none)
        coverage = found
        return Answer(
            bids,
            why_none,
            head=lambda alignment: self._part_bid(
                tenant, coverage, local_tokens, coverage.full_attention_tokens // alignment * alignment
            ),
            tail=lambda first: self._part_bid(tenant, coverage, first, coverage.tokens_after_head(first)),
        )

    def _bids(self, request: Request, found: Coverage | None, local_tokens: int) -> Sequence[Bid]:
        if found is None:
            # A placeholder for all tokens, if the chunk keys are still to come.
            most = request.num_tokens - 1 - local_tokens
            if most <= 0 or not self._prompts.are_pending(request.request_id):
                return ()
            return (Bid("names of chunks", (PlaceTokens(HOST, most),), looking=True),)
        bids: list[Bid] = []
        slowest = NO_TIER
        while slowest > 0:
            ends, slowest = found.longest(slowest)
            if ends > local_tokens:
                bids.append(self._bid(found, local_tokens, ends))
            if self._speeds is None:
                break
        return bids

    def _search_bid(self, request: Request, bids: Sequence[Bid], local_tokens: int) -> Sequence[Bid]:
        """Return a bid for all tokens, while other engines are asked which chunks they have.

        They may also have what slower tiers are known to have.
        """
        assert self._cache.searched is not None
        faster, seconds = self._cache.searched
        most, parts = request.num_tokens - 1 - local_tokens, list[PlaceTokens]()
        if bids:
            most = max(most, bids[0].tokens)
            parts += [part for part in bids[0].parts if part.place in faster]
        most -= sum([part.tokens for part in parts])
        if most <= 0:
            return ()
        parts.append(PlaceTokens(FLEET, most))
        return (Bid(_SEARCH, tuple(parts), looking=True, within_seconds=seconds),)

    def _part_bid(self, tenant: bytes, found: Coverage, first: int, last: int) -> Bid | None:
        return self._bid(found, first, last) if first < last and self._may_begin(tenant) else None

    def _bid(self, found: Coverage, first: int, last: int) -> Bid:
        """Return a bid that says how many tokens of the range ``[first, last)`` each tier provides."""
        # The group that needs the most chunks stands for all.
        sums = found.tokens_by_tier(self._widest_group, first, last)
        names = self._cache.ranked
        return Bid(TIERS, tuple([PlaceTokens(names[at], int(sums[at])) for at in np.flatnonzero(sums)]))

    def _why_none(
        self,
        request_id: str,
        tenant: bytes,
        chunks: PromptChunks | None,
        found: Coverage | None,
        *,
        busy: bool,
    ) -> SourceMiss:
        if busy:
            detail = f"loads under way: {len(self._under_way)}, as many as tier_loads allows"
            if self._tenants is not None:
                own = self._under_way.count(tenant)
                detail += f", and {own} of the tenant, its fair share or more"
            return SourceMiss(TIERS, MissReason.BUSY, detail=detail)
        if chunks is None or found is None:
            return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request_id))
        return _miss_of(chunks, found, self._labels, self._cache)

    def _may_begin(self, tenant: bytes) -> bool:
        """Return whether a load of a tenant may begin now."""
        under_way = self._under_way
        if self._tenants is None:
            return len(under_way) < self._most_loads
        own, settings = under_way.count(tenant), self._tenants.of(tenant)
        if own and own + 1 > settings.limit * self._most_loads:
            return False
        if len(under_way) < self._most_loads:
            return True
        # All are in use, and none can be taken back. A tenant below its fair share gets another one, so that
        # loads of others, however many and long, do not keep it waiting.
        here = {one.tenant for one in self._requests.values()}
        weights = sum(self._tenants.of(one).weight for one in here | {tenant})
        return own < self._most_loads * settings.weight / weights

    @property
    def _under_way(self) -> list[bytes]:
        """The tenant of each load under way."""
        return [feed.tenant for feed in self._feeds if feed.end is None]

    def has_room(self, bid: Bid, blocks: int) -> bool:
        # A late load from tiers pins no blocks, because its chunks stay in host memory.
        return True

    def begin(self, load: Load, request: Request) -> _ChunkFeed:
        """Start to fetch the chunks of a load into host memory."""
        chunks, state = self._prompts.get(request), self._requests[load.request_id]
        if chunks is None or state.coverage is None:
            fetch = self._cache.fetch(())
            fetch.failure = "its chunks have no names any more"
        else:
            fetch = self._cache.fetch(chunks.wanted_chunks(state.coverage, load.span), state.excluded_tiers)
        feed = _ChunkFeed(
            load=load,
            tenant=state.tenant,
            fetch=fetch,
            cache=self._cache,
            excluded_tiers=state.excluded_tiers,
            events=self._events,
            labels=self._labels,
            feed_of=self._feed_of,
        )
        # Feeds outlive their loads until all ranks have copied what was ordered, so they are removed here.
        self._feeds = [one for one in self._feeds if one.busy] + [feed]
        return feed

    def alignments(self, request_id: str) -> tuple[int, ...]:
        # A chunk of a windowed group may begin with zeros, because the engine had freed that KV. The valid KV
        # begins at a multiple of the alignment.
        return self._alignments

    def settled(self, request_id: str) -> None:
        """Do nothing: the tiers keep no lease."""

    def finished(self, request_id: str) -> None:
        del self._requests[request_id]

    def take_reports(self, reports: StepReports) -> None:
        """Release the host memory of chunks that all ranks have copied to KV blocks."""
        for key, report in reports.reports.items():
            if (feed := self._feed_of.get(key)) is None:
                continue
            if (part := feed.take_report(key, report, self._workers)) is not None:
                assert part.report is not None
                self._cache.copied(part.slots, part.report.figures.transfer_seconds)

    def start_anew(self) -> None:
        """Cancel all loads under way, because their chunks were computed before the cache was reset."""
        for feed in self._feeds:
            feed.stop("the cache was reset")


def _miss_of(chunks: PromptChunks, found: Coverage, labels: Sequence[str], cache: ChunkCache) -> SourceMiss:
    """Return why the tiers cannot extend the prefix of a prompt that the engine already has.

    EVICTED: all missing chunks (`found.missing`) were evicted recently. STORING: all of them are being copied
    to host memory. SHORT_PROMPT: the prompt is not longer than a chunk. LOCAL: no KV cache group can use a
    longer prefix than the engine has. OTHER_NAMESPACE: a tier has chunks of a model of the same name, but in
    another namespace only. NOT_STORED: none of these.
    """
    chunked, lacking = found.chunked, found.missing
    short = SourceMiss(
        TIERS,
        MissReason.SHORT_PROMPT,
        detail=f"{counted(chunked.prompt, 'token')}, chunks of {chunked.chunk_tokens}",
    )
    here = SourceMiss(
        TIERS,
        MissReason.LOCAL,
        detail=f"{chunked.local_tokens} of {counted(chunked.prompt, 'token')} here, no tier has more",
    )
    if not lacking:
        return short if chunked.prompt <= chunked.chunk_tokens else here
    whys = {cache.miss_reason(chunks.key_of(chunked, one.group, one.chunk)) for one in lacking}
    group = labels[lacking[0].group] if len(lacking) == 1 else "several"
    detail = ", ".join(f"chunk {one.chunk} of group {labels[one.group]}" for one in lacking)
    if len(whys) == 1 and (miss := _REMEMBERED.get(next(iter(whys)))) is not None:
        return SourceMiss(TIERS, miss, group, detail)
    if chunked.prompt < chunked.chunk_tokens:
        return short
    if 0 < chunked.local_tokens >= max(found.per_group):
        return here
    if same_name_namespace := cache.same_name_namespace:
        detail = f"there is nothing of this model, but of one of its name: namespace {same_name_namespace}"
        return SourceMiss(TIERS, MissReason.OTHER_NAMESPACE, detail=detail)
    return SourceMiss(TIERS, MissReason.NOT_STORED, group, detail)
