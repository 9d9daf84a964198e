"""The source that is our own tiers: chunks that were computed before, here or elsewhere.

A load is a fetch into host memory and, as chunks arrive there, parts for the ranks to copy to their blocks:

    begin ─▶ part, part, ... ─▶ end      to every rank, in this order
             each part done by all ranks ─▶ its slots are closed

The fetch is given up when the load has failed or is no longer wanted; ranks then hear the end at once, and
report the load when nothing of it is in flight.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvferry.cache.bids import Bid, Bidding, Part
from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.fetch import Fetch
from kvferry.cache.orders import LoadBegin, LoadEnd, LoadPart, MovedByAll, Piece
from kvferry.engines.vllm.lacks import lack_of
from kvferry.engines.vllm.meta import Report, SchedulerMeta
from kvferry.engines.vllm.prompts import Prompts
from kvferry.engines.vllm.refusals import Refusals
from kvferry.engines.vllm.source import Load
from kvferry.geometry import Group
from kvferry.geometry.canonical import Canonical
from kvferry.geometry.canonical.length import content_grain
from kvferry.observe.events import Lack, Miss, Moved
from kvferry.planning.chunks import Stretch
from kvferry.planning.coverage import NOWHERE, Coverage
from kvferry.planning.select import first_seen
from kvferry.tiers.host import Slot
from kvferry.tiers.names import HOST, TIERS
from kvferry.tiers.outcome import Get

logger = logging.getLogger(__name__)

COPIED = "copied"
"""How what tiers bring travels, as `planning.strategy` names the ways of what peers bring."""

_MISSES = {Get.ABSENT: Miss.EVICTED, Get.CORRUPT: Miss.CHECKSUM, Get.OTHER_SHAPE: Miss.CHECKSUM}
MOST_LOADS = 32
"""At once; beyond, prompts are computed: they would wait longer for what is before them."""


@dataclass(slots=True)
class _Asked:
    """A request that may be served.

    Attributes:
        bidding: of the request.
        without: tiers that are not asked for it.
        looked: what the last look-up came to, bid or not; None if there was none.
        declined: nothing was bid since too many loads were under way.
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
    tables: tuple[Stretch, ...]
    parts: int = 0


@dataclass(slots=True)
class _Brought:
    """What all ranks have copied of a load.

    Attributes:
        sizes: bytes per canonical group.
        miss: what kind of failure ended it, if one did.
    """

    sizes: Counter[int] = field(default_factory=Counter)
    miss: Miss = Miss.FAILED


class TierSource:
    """See the module.

    Attributes:
        copy_seconds: of parts of loads that ranks have copied, the slowest rank's; whoever looks takes them.
    """

    name = TIERS

    def __init__(
        self,
        cache: ChunkCache,
        prompts: Prompts,
        groups: tuple[Group, ...],
        canonical: Canonical,
        refusals: Refusals,
        timeout_seconds: float,
        *,
        apart: bool = False,
    ) -> None:
        """Begin.

        Args:
            cache: of this engine.
            prompts: where requests are named.
            groups: the engine's, as a rank has them.
            canonical: what chunks are.
            refusals: where what is not served is said.
            timeout_seconds: of a load.
            apart: offer what fewer of the slow tiers have as well.
        """
        self.copy_seconds: list[float] = []
        chunk_tokens = canonical.chunk_tokens
        self._cache, self._prompts, self._groups = cache, prompts, groups
        self._grains = tuple(content_grain(one.kind, one.reach, chunk_tokens) for one in groups)
        self._refusals, self._timeout, self._apart = refusals, timeout_seconds, apart
        self._widest = prompts.widest
        self._asked: dict[str, _Asked] = {}
        self._loading: dict[str, _Loading] = {}
        self._begins: list[LoadBegin] = []
        self._ends: list[LoadEnd] = []
        self._slots: dict[str, tuple[str, list[Slot]]] = {}
        self._brought: dict[str, _Brought] = {}
        self._labels = canonical.labels
        self._numbers = count()

    @property
    def busy(self) -> bool:
        """Something is under way."""
        return bool(self._loading or self._slots or self._begins or self._ends)

    def arrived(self, request: Any, bidding: Bidding) -> bool:
        """Every request whose chunks have certain names may be served, or soon will have."""
        if self._prompts.add(request) is None and not self._prompts.are_pending(request.request_id):
            return False
        self._asked[request.request_id] = _Asked(bidding)
        return True

    def declined(self, request: Any) -> Lack | None:
        """Its chunks have no certain names."""
        return Lack(TIERS, Miss.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))

    def bids(self, request: Any, have: int) -> Sequence[Bid]:
        """The longest prefix that all groups can continue from; if set so, also that of fewer slow tiers."""
        chunks = self._prompts.get(request)
        asked = self._asked[request.request_id]
        asked.declined, asked.looked = False, None
        if chunks is None:
            return self._naming(request, have)
        asked.looked = found = chunks.look_up(
            request.num_tokens,
            have,
            partial(self._cache.reading.places, without=asked.without),
            in_full=self._keeps_windows(request.num_tokens),
        )
        ends, slowest = found.longest()
        bids = [Bid(TIERS, self._parts(found, have, ends))] if ends > have else []
        while self._apart and slowest > 0:
            ends, slowest = found.longest(slowest)
            if ends > have:
                bids.append(Bid(TIERS, self._parts(found, have, ends)))
        if bids and len(self._loading) >= MOST_LOADS:
            asked.declined = True
            return ()
        return bids

    def _naming(self, request: Any, have: int) -> Sequence[Bid]:
        """A bid while the request's LoRA adapter is being read; what it may come to is not known."""
        most = request.num_tokens - 1 - have
        if most <= 0 or not self._prompts.are_pending(request.request_id):
            return ()
        return (Bid("names of chunks", (Part(HOST, most),), looking=True),)

    def head(self, request: Any, have: int, grain: int) -> Bid | None:
        """See `Source.head`."""
        found = self._asked[request.request_id].looked
        return None if found is None else self._part_of(found, have, found.beginning // grain * grain)

    def tail(self, request: Any, have: int, first: int) -> Bid | None:
        """See `Source.tail`."""
        found = self._asked[request.request_id].looked
        return None if found is None else self._part_of(found, first, found.after(first))

    def lack(self, request: Any, have: int) -> Lack:
        """Which chunks are not at hand, and why not, as far as that is remembered."""
        asked, chunks = self._asked[request.request_id], self._prompts.get(request)
        if asked.declined:
            return Lack(TIERS, Miss.BUSY, detail=f"{len(self._loading)} loads are under way")
        if chunks is None or asked.looked is None:
            return Lack(TIERS, Miss.UNNAMED, detail=self._prompts.why_unnamed(request.request_id))
        return lack_of(chunks, asked.looked, self._labels, self._cache)

    def room(self, bid: Bid, blocks: int) -> bool:
        """Always: what is late comes to host memory, and ranks copy no more of it."""
        return True

    def begin(self, load: Load, request: Any) -> None:
        """Fetch what the load takes; parts follow as it arrives."""
        chunks, asked = self._prompts.get(request), self._asked[load.request_id]
        if chunks is None or asked.looked is None:
            fetch = self._cache.reading.fetch(())
            fetch.failure = "its chunks have no names any more"
        else:
            fetch = self._cache.reading.fetch(chunks.wants(asked.looked, load.span), asked.without)
        tables = tuple(Stretch(0, tuple(ids)) for ids in load.tables)
        self._loading[load.key] = _Loading(load, fetch, tables)
        self._brought[load.key] = _Brought()
        self._begins.append(LoadBegin(load.key, load.request_id, self._timeout, load.attempt, load.loads))

    def grains(self, load: Load) -> tuple[int, ...]:
        """Of chunks, whoever wrote them."""
        return self._grains

    def origin(self, load: Load) -> str:
        """The tier that has the chunk which the load waits for longest: the slowest of them."""
        return self._cache.reading.origin(self._loading[load.key].fetch)

    def brought(self, load: Load, report: Report) -> tuple[Moved, ...]:
        """Of the canonical groups: ranks say of every part what they have copied."""
        sizes = self._brought.pop(load.key).sizes
        return tuple(
            Moved(self._labels[number], COPIED, size) for number, size in sorted(sizes.items()) if size
        )

    def blame(self, load: Load, report: Report) -> Miss:
        """Its deadline, or what was the matter with a chunk."""
        return Miss.DEADLINE if report.late else self._brought[load.key].miss

    def ended(self, load: Load, report: Report) -> None:
        """A tier that is too late with a chunk is not asked again for this request."""
        if report.failure is None:
            return
        self._refusals.say(load.request_id, TIERS, report.failure)
        if (loading := self._loading.get(load.key)) is not None:  # its deadline has passed
            self._asked[load.request_id].without |= self._cache.reading.awaited(loading.fetch)
            self._end(loading, report.failure)

    def dropped(self, load: Load) -> None:
        """Nobody waits for it any more."""
        if (loading := self._loading.get(load.key)) is not None:
            self._end(loading, "nobody waits for it any more")

    def settled(self, request_id: str) -> None:
        """Nothing: nobody keeps anything for it."""

    def finished(self, request_id: str) -> None:
        """The request has ended."""
        del self._asked[request_id]

    def hand_over(self, meta: SchedulerMeta) -> None:
        """Loads begun, what has arrived for each, and loads that are complete."""
        orders = meta.chunks
        orders.begins, self._begins = self._begins, []
        for loading in list(self._loading.values()):
            if ready := loading.fetch.take():
                orders.parts.append(
                    self._part(loading, [Piece(w.group, w.number, s.offset) for w, s in ready])
                )
                self._slots[orders.parts[-1].key] = loading.load.key, [slot for _, slot in ready]
            if loading.fetch.over:
                self._asked_of(loading).without |= loading.fetch.failed
                self._end(loading, loading.fetch.failure)
        orders.ends, self._ends = self._ends, []

    def moved(self, moved: MovedByAll) -> bool:
        """All ranks have done an order; whether it was a part of a load."""
        load, slots = self._slots.pop(moved.key, ("", None))
        if slots is None:
            return False
        for slot in reversed(slots):
            self._cache.close(slot)
        self.copy_seconds.append(moved.seconds)
        if (brought := self._brought.get(load)) is not None:
            brought.sizes.update(dict(enumerate(moved.bytes_by_group)))
        return True

    def start_anew(self) -> None:
        """What loads under way bring was kept before, and is not to be used any more."""
        for loading in list(self._loading.values()):
            self._end(loading, "the cache was reset")

    def _part_of(self, found: Coverage, first: int, last: int) -> Bid | None:
        if first >= last or len(self._loading) >= MOST_LOADS:
            return None
        return Bid(TIERS, self._parts(found, first, last))

    def _parts(self, found: Coverage, first: int, last: int) -> tuple[Part, ...]:
        """Where tokens ``[first, last)`` come from, by the chunks of the group that needs most of them.

        One that is nowhere is not needed: it costs as little as one of host memory.
        """
        size = found.cut.chunk_tokens
        low, high = first // size, -(-last // size)
        row = found.places[self._widest, low:high] % NOWHERE
        sums = np.bincount(row) * size
        sums[row[0]] -= first - low * size
        sums[row[-1]] -= high * size - last
        names = (HOST, *self._cache.tiers)
        return tuple(Part(names[at], int(sums[at])) for at in np.flatnonzero(sums))

    def _keeps_windows(self, tokens: int) -> bool:
        """Whether the engine, given all tokens of a prompt, still has what its last token sees.

        It computes the last token again, but lets go of blocks that only a token after it would not see.
        """
        return all(
            first_seen(one.kind, one.reach, tokens - 1) // one.block_tokens
            == first_seen(one.kind, one.reach, tokens) // one.block_tokens
            for one in self._groups
            if one.reach and tokens >= one.reach
        )

    def _part(self, loading: _Loading, pieces: list[Piece]) -> LoadPart:
        key = f"{loading.load.key}/{next(self._numbers)}"
        loading.parts += 1
        pieces.sort(key=lambda piece: (piece.group, piece.number))
        first = loading.parts == 1
        return LoadPart(key, loading.load.key, loading.load.span, tuple(pieces), loading.tables, first)

    def _end(self, loading: _Loading, failure: str | None) -> None:
        del self._loading[loading.load.key]
        self._cache.reading.cancel(loading.fetch)
        if loading.fetch.miss in _MISSES and (brought := self._brought.get(loading.load.key)):
            brought.miss = _MISSES[loading.fetch.miss]
        self._ends.append(LoadEnd(loading.load.key, failure))

    def _asked_of(self, loading: _Loading) -> _Asked:
        return self._asked.get(loading.load.request_id) or _Asked(Bidding(0))
