"""The source of chunks that this engine's tiers keep.

A load fetches chunks into host memory and, as they arrive, orders parts that ranks copy to their blocks:

    begin ─▶ part, part, ... ─▶ end      to every rank, in this order
             each part done by all ranks ─▶ its slots are closed

The fetch is cancelled when the load fails or nobody waits for it. Ranks then get the end at once, and report
the load when nothing of it is in flight.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.fetch import Fetch
from kvferry.connector.bids import Bid, Bidding, Part
from kvferry.connector.decisions import MissReason, SourceMiss
from kvferry.connector.engine import Request
from kvferry.connector.load import Load
from kvferry.connector.load_results import GroupBytes
from kvferry.connector.messages import Report, StepOrders
from kvferry.connector.refusals import Refusals
from kvferry.connector.tiers.misses import miss_of
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.worker.orders import LoadEnd, LoadPart, MovedByAll, Piece
from kvferry.geometry import Group
from kvferry.geometry.canonical import CanonicalForm
from kvferry.geometry.canonical.length import content_alignment
from kvferry.planning.coverage import NO_TIER, Coverage
from kvferry.planning.select import first_attended
from kvferry.tiers.host.tier import Slot
from kvferry.tiers.names import HOST, TIERS
from kvferry.tiers.outcome import GetOutcome

logger = logging.getLogger(__name__)

COPIED = "copied"
"""Name of the way that chunks travel, beside the strategies of loads from peers."""

_MISSES = {
    GetOutcome.ABSENT: MissReason.EVICTED,
    GetOutcome.CORRUPT: MissReason.CHECKSUM,
    GetOutcome.OTHER_SHAPE: MissReason.CHECKSUM,
}
MOST_LOADS = 32
"""Most loads at once. Beyond them prompts are computed, because they would wait for the loads before them."""


@dataclass(slots=True)
class _Asked:
    """A request that may be served.

    Attributes:
        bidding: its bids and attempts.
        without: names of tiers that are not asked for it.
        looked: result of the last look-up; None if there was none.
        declined: nothing was bid because too many loads were under way.
    """

    bidding: Bidding
    without: set[str] = field(default_factory=set)
    looked: Coverage | None = None
    declined: bool = False


@dataclass(slots=True)
class _Loading:
    """A load that has not been ended."""

    load: Load
    fetch: Fetch
    parts: int = 0


@dataclass(slots=True)
class _Brought:
    """The bytes that all ranks have copied of a load.

    Attributes:
        sizes: bytes per canonical group.
        miss: the kind of failure that ended it, if one did.
    """

    sizes: Counter[int] = field(default_factory=Counter)
    miss: MissReason = MissReason.FAILED


class TierSource:
    """Bids chunks of this engine's tiers, and orders their loads. Only the engine's thread calls it."""

    name = TIERS

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        groups: tuple[Group, ...],
        canonical: CanonicalForm,
        refusals: Refusals,
        *,
        apart: bool = False,
    ) -> None:
        """Begin.

        Args:
            cache: the engine's chunks.
            prompts: names of requests' chunks.
            groups: the engine's groups, as a rank has them.
            canonical: the form of chunks.
            refusals: logs requests that are not served.
            apart: also bid the shorter prefixes that do without the slowest tiers.
        """
        self._copy_seconds: list[float] = []
        chunk_tokens = canonical.chunk_tokens
        self._cache, self._prompts, self._groups = cache, prompts, groups
        self._alignments = tuple(
            content_alignment(one.kind, one.attention_span, chunk_tokens) for one in groups
        )
        self._refusals, self._apart = refusals, apart
        self._widest = prompts.widest
        self._asked: dict[str, _Asked] = {}
        self._loading: dict[str, _Loading] = {}
        self._ends: list[LoadEnd] = []
        self._slots: dict[str, tuple[str, list[Slot]]] = {}
        self._brought: dict[str, _Brought] = {}
        self._labels = canonical.labels
        self._numbers = count()

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loading or self._slots or self._ends)

    def arrived(self, request: Request, bidding: Bidding) -> bool:
        """Take a request whose chunks have certain names, or soon will have."""
        if self._prompts.add(request) is None and not self._prompts.are_pending(request.request_id):
            return False
        self._asked[request.request_id] = _Asked(bidding)
        return True

    def declined(self, request: Request) -> SourceMiss | None:
        """Say why its chunks have no certain names."""
        return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))

    def bids(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Bid the longest prefix that all groups can continue from, and shorter ones with `apart`."""
        chunks = self._prompts.get(request)
        asked = self._asked[request.request_id]
        asked.declined, asked.looked = False, None
        if chunks is None:
            return self._naming(request, local_tokens)
        asked.looked = found = chunks.look_up(
            request.num_tokens,
            local_tokens,
            partial(self._cache.reading.tier_numbers, without=asked.without),
            in_full=self._keeps_windows(request.num_tokens),
        )
        ends, slowest = found.longest()
        bids = [Bid(TIERS, self._parts(found, local_tokens, ends))] if ends > local_tokens else []
        while self._apart and slowest > 0:
            ends, slowest = found.longest(slowest)
            if ends > local_tokens:
                bids.append(Bid(TIERS, self._parts(found, local_tokens, ends)))
        if bids and len(self._loading) >= MOST_LOADS:
            asked.declined = True
            return ()
        return bids

    def _naming(self, request: Request, local_tokens: int) -> Sequence[Bid]:
        """Bid as still looking while the request's LoRA adapter is being read."""
        most = request.num_tokens - 1 - local_tokens
        if most <= 0 or not self._prompts.are_pending(request.request_id):
            return ()
        return (Bid("names of chunks", (Part(HOST, most),), looking=True),)

    def head(self, request: Request, local_tokens: int, alignment_tokens: int) -> Bid | None:
        """See `Source.head`."""
        found = self._asked[request.request_id].looked
        return (
            None
            if found is None
            else self._part_of(
                found, local_tokens, found.full_attention_tokens // alignment_tokens * alignment_tokens
            )
        )

    def tail(self, request: Request, local_tokens: int, first: int) -> Bid | None:
        """See `Source.tail`."""
        found = self._asked[request.request_id].looked
        return None if found is None else self._part_of(found, first, found.after(first))

    def why_no_bid(self, request: Request, local_tokens: int) -> SourceMiss:
        """Name the chunks that are missing, and why, as far as that is remembered."""
        asked, chunks = self._asked[request.request_id], self._prompts.get(request)
        if asked.declined:
            return SourceMiss(TIERS, MissReason.BUSY, detail=f"{len(self._loading)} loads are under way")
        if chunks is None or asked.looked is None:
            return SourceMiss(TIERS, MissReason.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))
        return miss_of(chunks, asked.looked, self._labels, self._cache)

    def room(self, bid: Bid, blocks: int) -> bool:
        """Return True: late chunks land in host memory, and ranks copy no more of them."""
        return True

    def begin(self, load: Load, request: Request) -> None:
        """Start to fetch the chunks of a load; `hand_over` orders parts as they arrive."""
        chunks, asked = self._prompts.get(request), self._asked[load.request_id]
        if chunks is None or asked.looked is None:
            fetch = self._cache.reading.fetch(())
            fetch.failure = "its chunks have no names any more"
        else:
            fetch = self._cache.reading.fetch(chunks.wanted_chunks(asked.looked, load.span), asked.without)
        self._loading[load.key] = _Loading(load, fetch)
        self._brought[load.key] = _Brought()

    def alignments(self, request_id: str) -> tuple[int, ...]:
        """Return the tokens at which content of chunks begins, the same for every writer."""
        return self._alignments

    def origin(self, load: Load) -> str:
        """Return the slowest tier that the load waits for."""
        return self._cache.reading.origin(self._loading[load.key].fetch)

    def loaded_bytes(self, load: Load, report: Report) -> tuple[GroupBytes, ...]:
        """Return the bytes that ranks have copied, per canonical group."""
        sizes = self._brought[load.key].sizes
        return tuple(
            GroupBytes(self._labels[number], COPIED, size) for number, size in sorted(sizes.items()) if size
        )

    def failure_reason(self, load: Load, report: Report) -> MissReason:
        """Return DEADLINE, or the fault of the chunk that failed."""
        return MissReason.DEADLINE if report.late else self._brought[load.key].miss

    def ended(self, load: Load, report: Report) -> None:
        """Log a failed load; do not ask tiers again that were late with a chunk of it."""
        if report.failure is None:
            return
        self._refusals.say(load.request_id, TIERS, report.failure)
        if (loading := self._loading.get(load.key)) is not None:  # its deadline has passed
            self._asked[load.request_id].without |= self._cache.reading.awaited_tiers(loading.fetch)
            self._end(loading, report.failure)

    def forget(self, load: Load) -> None:
        """Forget what a load has brought."""
        del self._brought[load.key]

    def take_copy_seconds(self) -> list[float]:
        """Return the seconds that the slowest rank took for each part of a load since the last call."""
        taken, self._copy_seconds = self._copy_seconds, []
        return taken

    def dropped(self, load: Load) -> None:
        """Cancel a load that nobody waits for."""
        if (loading := self._loading.get(load.key)) is not None:
            self._end(loading, "nobody waits for it any more")

    def settled(self, request_id: str) -> None:
        """Do nothing: tiers hold nothing for a request."""

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        del self._asked[request_id]

    def hand_over(self, orders: StepOrders) -> None:
        """Order the parts of loads that have arrived, and the ends of loads that are complete."""
        chunks = orders.chunks
        for loading in list(self._loading.values()):
            if ready := loading.fetch.take():
                chunks.parts.append(
                    self._part(loading, [Piece(w.group, w.number, s.offset) for w, s in ready])
                )
                self._slots[chunks.parts[-1].key] = loading.load.key, [slot for _, slot in ready]
            if loading.fetch.over:
                self._asked_of(loading).without |= loading.fetch.failed
                self._end(loading, loading.fetch.failure)
        chunks.ends, self._ends = self._ends, []

    def moved(self, moved: MovedByAll) -> bool:
        """Handle an order that all ranks have carried out; return whether it was a part of a load."""
        load, slots = self._slots.pop(moved.key, ("", None))
        if slots is None:
            return False
        for slot in reversed(slots):
            self._cache.close(slot)
        self._copy_seconds.append(moved.seconds)
        if (brought := self._brought.get(load)) is not None:
            brought.sizes.update(dict(enumerate(moved.bytes_by_group)))
        return True

    def start_anew(self) -> None:
        """Cancel all loads under way: they bring chunks from before the reset."""
        for loading in list(self._loading.values()):
            self._end(loading, "the cache was reset")

    def _part_of(self, found: Coverage, first: int, last: int) -> Bid | None:
        if first >= last or len(self._loading) >= MOST_LOADS:
            return None
        return Bid(TIERS, self._parts(found, first, last))

    def _parts(self, found: Coverage, first: int, last: int) -> tuple[Part, ...]:
        """Split tokens ``[first, last)`` by place, following the group that needs most chunks.

        A chunk that is nowhere is not needed, and counts as one in host memory.
        """
        size = found.chunked.chunk_tokens
        low, high = first // size, -(-last // size)
        row = found.tier_numbers[self._widest, low:high] % NO_TIER
        sums = np.bincount(row) * size
        sums[row[0]] -= first - low * size
        sums[row[-1]] -= high * size - last
        names = (HOST, *self._cache.tiers)
        return tuple(Part(names[at], int(sums[at])) for at in np.flatnonzero(sums))

    def _keeps_windows(self, tokens: int) -> bool:
        """Return whether a load of all tokens of a prompt leaves the engine what its last token sees.

        The engine computes the last token again, but has freed blocks that the token after it does not see.
        """
        return all(
            first_attended(one.kind, one.attention_span, tokens - 1) // one.block_tokens
            == first_attended(one.kind, one.attention_span, tokens) // one.block_tokens
            for one in self._groups
            if one.attention_span and tokens >= one.attention_span
        )

    def _part(self, loading: _Loading, pieces: list[Piece]) -> LoadPart:
        key = f"{loading.load.key}/{next(self._numbers)}"
        loading.parts += 1
        pieces.sort(key=lambda piece: (piece.group, piece.number))
        first = loading.parts == 1
        return LoadPart(key, loading.load, tuple(pieces), first)

    def _end(self, loading: _Loading, failure: str | None) -> None:
        del self._loading[loading.load.key]
        self._cache.reading.cancel(loading.fetch)
        if loading.fetch.miss in _MISSES and (brought := self._brought.get(loading.load.key)):
            brought.miss = _MISSES[loading.fetch.miss]
        self._ends.append(LoadEnd(loading.load.key, failure))

    def _asked_of(self, loading: _Loading) -> _Asked:
        return self._asked.get(loading.load.request_id) or _Asked(Bidding(0))
