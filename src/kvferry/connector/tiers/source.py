"""The source that loads KV from this engine's tiers: host memory, files, object stores.

A *chunk* is a fixed number of tokens of a KV cache group, as stored. A load fetches chunks into slots of host
memory. As they arrive, ranks copy them to their KV blocks (`feed`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.bids import Bid, Bidding, PlaceTokens
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.connector.engine import Request
from kvferry.connector.load import Load
from kvferry.connector.refusals import Refusals
from kvferry.connector.tiers.feed import ChunkFeed
from kvferry.connector.tiers.misses import miss_of
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.worker.orders import MergedCopyReport
from kvferry.geometry import Group
from kvferry.geometry.canonical import CanonicalForm
from kvferry.geometry.canonical.length import content_alignment
from kvferry.planning.coverage import Coverage
from kvferry.planning.select import windows_survive_load
from kvferry.tiers.names import HOST, TIERS

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _TierRequest:
    """The state of a request whose KV the tiers may hold.

    Attributes:
        bidding: excluded sources of the request, and its remaining attempts to load KV.
        excluded_tiers: names of the tiers that are not used again for this request, because a read from them
            failed or missed its deadline.
        coverage: result of the last look-up of the request's chunks; None before the first look-up.
        declined: True if the tiers might have had chunks to offer when they were last asked, but made no
            offer because too many loads were under way.
    """

    bidding: Bidding
    excluded_tiers: set[str] = field(default_factory=set)
    coverage: Coverage | None = None
    declined: bool = False


class TierSource:
    """The source that loads KV from this engine's tiers, in chunks (fixed numbers of tokens).

    For each request, the source makes bids. A bid is the offer of a source to load a part of the prompt. Only
    the engine's thread calls the methods.
    """

    name = TIERS

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        groups: tuple[Group, ...],
        canonical: CanonicalForm,
        refusals: Refusals,
        *,
        most_loads: int,
        bid_per_tier: bool = False,
    ) -> None:
        """Create the source. It has no requests yet.

        Args:
            cache: chunks in host memory and in the slower tiers.
            prompts: chunk keys of the engine's requests.
            groups: the engine's KV cache groups, as one rank describes them.
            canonical: format in which chunks are stored.
            refusals: log of the requests that a tier cannot serve.
            most_loads: maximum number of concurrent loads. A further load would have to wait for these, so
                the source then makes no offer.
            bid_per_tier: True to make further bids for shorter prefixes that need no chunk of the slowest
                tiers, so that the source policy can choose a shorter but faster load.
        """
        self._copy_seconds: list[float] = []
        chunk_tokens = canonical.chunk_tokens
        self._cache, self._prompts, self._groups = cache, prompts, groups
        self._alignments = tuple(content_alignment(one, chunk_tokens) for one in groups)
        self._refusals, self._bid_per_tier, self._most_loads = refusals, bid_per_tier, most_loads
        self._widest_group = prompts.widest_group
        self._requests: dict[str, _TierRequest] = {}
        self._feeds: list[ChunkFeed] = []
        self._labels = canonical.labels

    @property
    def busy(self) -> bool:
        """Whether a load of chunks is under way, or ranks still copy chunks out of host memory."""
        return any(feed.busy for feed in self._feeds)

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Compute the chunk keys of a new request. Return True if the tiers may be able to serve the request.

        The tiers cannot serve a request that has no chunk keys, because its content cannot be identified for
        certain.

        Args:
            request: new request.
            bidding: excluded sources of the request, and its remaining attempts to load KV.
        """
        if self._prompts.add(request) is None and not self._prompts.are_pending(request.request_id):
            return False
        self._requests[request.request_id] = _TierRequest(bidding)
        return True

    def declined(self, request: Request) -> SourceMiss | None:
        """Return the reason why the tiers cannot serve a request: why it has no chunk keys.

        Args:
            request: request for which `arrived` returned False.
        """
        return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return the tiers' offers (bids) to load tokens of a request's prompt; empty if there are none.

        The first bid is for the longest prefix from which every KV cache group can continue. If the source
        was created with `bid_per_tier`, further bids are for shorter prefixes without chunks of the slowest
        tiers.

        There is no bid while as many loads are under way as there may be, not even one that is `looking`: the
        request is not to wait for the tiers.

        Args:
            request: request that waits to be scheduled.
            local_tokens: number of tokens that the engine has already, from the start of the prompt.
        """
        chunks = self._prompts.get(request)
        state = self._requests[request.request_id]
        state.coverage = None
        if chunks is None:
            return self._unless_busy(state, self._bid_before_naming(request, local_tokens))
        state.coverage = found = chunks.look_up(
            request.num_tokens,
            local_tokens,
            partial(self._cache.reading.tier_numbers, without=state.excluded_tiers),
            in_full=windows_survive_load(self._groups, request.num_tokens),
        )
        ends, slowest = found.longest()
        bids = [Bid(TIERS, self._parts(found, local_tokens, ends))] if ends > local_tokens else []
        while self._bid_per_tier and slowest > 0:
            ends, slowest = found.longest(slowest)
            if ends > local_tokens:
                bids.append(Bid(TIERS, self._parts(found, local_tokens, ends)))
        return self._unless_busy(state, bids)

    def _unless_busy(self, state: _TierRequest, bids: Sequence[Bid]) -> Sequence[Bid]:
        """Return the bids, or none if too many loads are under way.

        Args:
            state: state of the request. Its field `declined` is set if there are bids, but none is returned.
            bids: offers of the tiers to load tokens of the request's prompt.
        """
        state.declined = bool(bids) and self._is_busy
        return () if state.declined else bids

    @property
    def _is_busy(self) -> bool:
        return self._under_way >= self._most_loads

    @property
    def _under_way(self) -> int:
        return sum(feed.fetches for feed in self._feeds)

    def _bid_before_naming(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Return a placeholder bid for a request whose chunk keys are not known yet.

        While the digest of the request's LoRA adapter is being computed, return one bid for all tokens that
        could be loaded. It is an upper bound, marked by its attribute `looking`. Return no bid if the keys
        cannot be computed at all, or if no token is left to load.
        """
        most = request.num_tokens - 1 - local_tokens
        if most <= 0 or not self._prompts.are_pending(request.request_id):
            return ()
        return (Bid("names of chunks", (PlaceTokens(HOST, most),), looking=True),)

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """Return an offer (bid) to load the first part of a prefix, for a load that two sources share.

        Another source loads the rest. The bid covers only the layers that attend to all tokens. Return None
        if no token remains.

        Args:
            request: request for which `bids` was called.
            local_tokens: number of tokens that the engine has already, from the start of the prompt.
            alignment_tokens: alignment, in tokens, of the end of the first part.
        """
        found = self._requests[request.request_id].coverage
        return (
            None
            if found is None
            else self._bid_for(
                found, local_tokens, found.full_attention_tokens // alignment_tokens * alignment_tokens
            )
        )

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """Return an offer (bid) to load the last part of a prefix, for a load that two sources share.

        Another source loads the first part. Return None if the tiers hold no usable prefix that is longer
        than `first`.

        Args:
            request: request for which `bids` was called.
            local_tokens: number of tokens that the engine has already; unused.
            first: position in tokens, from the start of the prompt, at which the first part ends.
        """
        found = self._requests[request.request_id].coverage
        return None if found is None else self._bid_for(found, first, found.tokens_after_head(first))

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Return the reason why the tiers made no offer (bid) to load tokens of a request's prompt.

        If chunks are missing, the result names these chunks and, where the tiers know it, why they are
        missing (for example eviction).

        Args:
            request: request for which `bids` returned no offer.
            local_tokens: number of tokens that the engine has already; unused.
        """
        state, chunks = self._requests[request.request_id], self._prompts.get(request)
        if state.declined:
            detail = f"loads under way: {self._under_way}, as many as tier_loads allows"
            return SourceMiss(TIERS, MissReason.BUSY, detail=detail)
        if chunks is None or state.coverage is None:
            return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))
        return miss_of(chunks, state.coverage, self._labels, self._cache)

    def has_room(self, bid: Bid, blocks: int) -> bool:
        """Return whether a load of `blocks` KV blocks may begin now: always True for tiers.

        Other sources limit their loads, because a late transfer keeps its KV blocks allocated. A late load
        from tiers keeps none: chunks that arrive after the deadline stay in host memory.

        Args:
            bid: offer to load a part of a prompt; unused.
            blocks: number of KV blocks that the load would fill; unused.
        """
        return True

    def begin(self, load: Load, request: Request) -> ChunkFeed:
        """Start to fetch the chunks of a load into host memory.

        Args:
            load: load to begin, with its tokens and destination blocks.
            request: request that waits for the load.
        """
        chunks, state = self._prompts.get(request), self._requests[load.request_id]
        if chunks is None or state.coverage is None:
            fetch = self._cache.reading.fetch(())
            fetch.failure = "its chunks have no names any more"
        else:
            fetch = self._cache.reading.fetch(
                chunks.wanted_chunks(state.coverage, load.span), state.excluded_tiers
            )
        feed = ChunkFeed(
            load,
            fetch,
            reading=self._cache.reading,
            excluded_tiers=state.excluded_tiers,
            refusals=self._refusals,
            labels=self._labels,
        )
        self._feeds = [one for one in self._feeds if one.busy] + [feed]
        return feed

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return, for each KV cache group of the engine, the alignment of the content of chunks, in tokens.

        A chunk of a windowed group may begin with zeros, because the engine had freed that KV. The valid KV
        begins at a multiple of the alignment. All requests have the same alignments.
        """
        return self._alignments

    def take_copy_seconds(self) -> list[float]:
        """Return the copy times recorded since the last call, and clear them.

        There is one entry per part of a load: the seconds that the slowest rank took to copy that part.
        """
        taken, self._copy_seconds = self._copy_seconds, []
        return taken

    def settled(self, request_id: str) -> None:
        """Do nothing when a request will load no more KV. The tiers keep no lease for the request."""

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        del self._requests[request_id]

    def on_copied(self, report: MergedCopyReport) -> bool:
        """Release the host memory of chunks that all ranks have copied to KV blocks.

        Args:
            report: merged report of all ranks about one order to copy chunks.

        Returns:
            False if the order belongs to no load, else True.
        """
        feed = next((feed for feed in self._feeds if report.key in feed.copying), None)
        if feed is None:
            return False
        for slot in reversed(feed.take_copied(report)):
            self._cache.close(slot)
        self._copy_seconds.append(report.seconds)
        return True

    def start_anew(self) -> None:
        """Cancel all loads under way, because their chunks were computed before the cache was reset."""
        for feed in self._feeds:
            feed.stop("the cache was reset")

    def _bid_for(self, found: Coverage, first: int, last: int) -> Bid | None:
        if first >= last or self._is_busy:
            return None
        return Bid(TIERS, self._parts(found, first, last))

    def _parts(self, found: Coverage, first: int, last: int) -> tuple[PlaceTokens, ...]:
        """Return the number of tokens that each tier provides for an offer to load a part of a prompt.

        Only chunks of the KV cache group that needs the most chunks are counted.

        Args:
            found: result of the look-up of the request's chunks.
            first, last: token range ``[first, last)`` that the offer covers.
        """
        sums = found.tokens_by_tier(self._widest_group, first, last)
        names = (HOST, *self._cache.tiers)
        return tuple(PlaceTokens(names[at], int(sums[at])) for at in np.flatnonzero(sums))
