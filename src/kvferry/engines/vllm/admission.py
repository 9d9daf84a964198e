"""Which source serves a request: bids are taken, loads seen to their end, and failures lead to the next bid.

One `_Wish` per request that some source might serve:

    OPEN ─admitted with blocks─▶ LOADING ─all workers ready─▶ SERVED
      │                             └─failed or late─▶ (struck out) FAILED ─lets others pass─▶ OPEN ─▶ …
      └─nothing to load─▶ SERVED ─preempted, admitted anew─▶ OPEN

vLLM keeps a request whose load failed before those whose loads hold blocks, and its place for the failed load
reserved: if it needed more blocks than are left, neither it nor they would ever go on. So it stands aside
once, and an offer after a failure that finds no room at once is withdrawn: the prompt is computed, for which
vLLM reserves nothing. Nor is a load begun that leaves too little `headroom` for others that wait, or for
which its source has no room: others go on first, as long as there is patience; then the prompt is computed.

That every request ends is the rule of `cache.bids`: a load brings a request further, or is not begun.

Where two sources bring a prefix together (`offers`), the request waits for two loads. When one of them has
failed, on any worker, the other is given up, without blame: the request goes on, and what is in flight lands
in blocks that it does not have any more.

Blocks being written are pinned in the engine's pool until every worker says that nothing is in flight,
whatever became of the request meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvferry.cache.bids import Bidding
from kvferry.cache.pins import Pins
from kvferry.cache.policies import Choice
from kvferry.cache.waiting import Waiting
from kvferry.engines.vllm.compat.specs import reach_of, state_position
from kvferry.engines.vllm.headroom import Headroom
from kvferry.engines.vllm.meta import BlockIds, Report, SchedulerMeta, WorkerMeta
from kvferry.engines.vllm.must_compute import must_compute
from kvferry.engines.vllm.offers import Offer, grain_of, offers_of
from kvferry.engines.vllm.part_blocks import PartBlocks
from kvferry.engines.vllm.source import Load, Source
from kvferry.engines.vllm.telling import OTHER_PART, Telling
from kvferry.geometry import GroupKind
from kvferry.observe.watch import Watch
from kvferry.planning.select import Span, most_written, written


class _State(Enum):
    OPEN = "open"
    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"


@dataclass(slots=True)
class _Wish:
    """A request, and where it stands.

    Attributes:
        bidding: over its attempts.
        sources: that might serve it.
        state: see the module.
        taken: the offer that the engine was last made, and how many tokens it had.
        loads: under way.
        broken: one of this attempt has failed.
        failed: the last attempt did.
        waiting: for bids of sources that were looking, and for room.
        crowded: there was no room for what was taken.
    """

    bidding: Bidding
    sources: tuple[Source, ...]
    state: _State = _State.OPEN
    taken: tuple[Offer, int] | None = None
    loads: list[Load] = field(default_factory=list)
    broken: bool = False
    failed: bool = False
    waiting: Waiting = field(default_factory=Waiting)
    crowded: bool = False


class Admission:
    """See the module. The engine's thread calls it.

    Attributes:
        pins: destinations of loads.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        kinds: tuple[GroupKind, ...],
        pins: Pins[Any],
        parts: PartBlocks,
        headroom: Headroom,
        pool: Any,
        workers: int,
        attempts: int,
        sources: Sequence[Source],
        choice: Choice,
        watch: Watch,
    ) -> None:
        """Begin.

        Args:
            kv_cache_config: vLLM's.
            kinds: of its groups.
            pins: shared with the sources, which look at what late loads hold.
            parts: blocks that loads fill in part.
            headroom: for what comes after loads.
            pool: the engine's block pool.
            workers: how many report a load.
            attempts: loads of a request.
            sources: asked in this order; the first of equal bids is taken.
            choice: between what they offer.
            watch: told of what is decided.
        """
        self.pins = pins
        self._groups, self._kinds = kv_cache_config.kv_cache_groups, kinds
        self._parts, self._headroom, self._pool = parts, headroom, pool
        self._workers, self._attempts = workers, attempts
        self._sources, self._choice = tuple(sources), choice
        self._telling = Telling(watch, choice.policy)
        self._blocks = [
            (kind, reach_of(group.kv_cache_spec), int(group.kv_cache_spec.block_size))
            for kind, group in zip(kinds, self._groups, strict=True)
        ]
        self._grain = grain_of((kind, block) for kind, _, block in self._blocks)
        self._wishes: dict[str, _Wish] = {}
        self._loads: dict[str, tuple[Source, Load]] = {}
        self._given_up: dict[str, str] = {}
        self._brought: dict[str, Bidding] = {}
        self._count = 0

    def __len__(self) -> int:
        """Requests that a source might serve, or has served."""
        return len(self._wishes)

    def on_new_request(self, request: Any) -> None:
        """Ask the sources which of them may serve a request."""
        bidding = Bidding(self._attempts)
        sources = tuple(source for source in self._sources if source.arrived(request, bidding))
        self._telling.arrived(request, sources, [one for one in self._sources if one not in sources])
        if sources:
            self._wishes[request.request_id] = _Wish(bidding, sources)

    def matched(self, request: Any, have: int) -> int | None:
        """Tokens that can be loaded beyond `have`; None while that is not known, and to let others pass."""
        if self._parts.evict():
            return None  # some of what the engine has just found for this request may be among them
        wish = self._wishes.get(request.request_id)
        if wish is None or wish.state is _State.LOADING:
            return 0
        if wish.state is _State.FAILED:
            wish.state, wish.failed = _State.OPEN, True
            return None
        if wish.failed and wish.taken is not None:
            self._telling.no_room(request.request_id, have)
            return 0
        wish.state = _State.OPEN
        if (why := must_compute(request, have)) is not None:
            wish.taken = None
            self._telling.not_asked(request, wish.sources, have, *why)
            return 0
        return self._best(wish, request, have)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request has blocks; `external` tokens are to be loaded into them, or none."""
        wish = self._wishes.get(request.request_id)
        if wish is not None and wish.state is _State.SERVED:
            self._parts.goes_on(request.request_id)
        if wish is None or wish.state is not _State.OPEN:
            return
        self._parts.forget(request.request_id)  # of an admission before this one
        wish.failed = False
        if external == 0 or wish.taken is None:
            if wish.taken is not None and wish.crowded:
                self._telling.no_room(request.request_id, wish.taken[1])
            wish.taken = None
            self._settle(request.request_id, wish)
            self._telling.unserved(request)
            return
        wish.state, wish.broken = _State.LOADING, False
        wish.bidding.take()
        self._headroom.loads(request.request_id, wish.taken[1] + external, request.num_tokens)
        self._begin(wish, request, blocks, external)
        wish.taken = None

    def origins(self, request_id: str) -> Counter[str]:
        """Tokens that a request waits for, by where most of each load comes from: ``peer``, or a tier."""
        found = Counter[str]()
        for load in self._wishes[request_id].loads:
            found[self._loads[load.key][0].origin(load)] += load.span.ends - load.span.begins
        return found

    def finished(self, request_id: str) -> None:
        """The request has ended, whichever way: nothing more is wanted for it."""
        self._headroom.forget(request_id)
        self._brought.pop(request_id, None)
        wish = self._wishes.pop(request_id, None)
        if wish is None:
            self._telling.finished(request_id)
            return
        for load in wish.loads:
            self.pins.late(load.key)
            self._loads[load.key][0].dropped(load)
        self._settle(request_id, wish)
        for source in wish.sources:
            source.finished(request_id)
        self._telling.finished(request_id)
        self._telling.late(self.pins.all_late_blocks)

    def scheduled(self, requests: Container[str]) -> None:
        """The coming step computes something of these."""
        self._headroom.go_on(requests)
        for name in [name for name in self._brought if name in requests]:
            self._brought.pop(name).computed()
        self._telling.scheduled(requests)

    def hand_over(self, meta: SchedulerMeta) -> None:
        """Give the workers what has been decided since the last step."""
        self._parts.end_pass()
        meta.given_up, self._given_up = self._given_up, {}
        for source in self._sources:
            source.hand_over(meta)

    def take_reports(self, meta: WorkerMeta) -> None:
        """Hear how loads ended, and give back the blocks of which nothing is in flight."""
        bad = [self._loads[key][1] for key, report in meta.reports.items() if report.failure is not None]
        for key, report in meta.reports.items():
            self._report(key, report, meta.reported.get(key, 1))
        for load in bad:
            if not load.given_up:
                self._give_up_beside(load)
        for key, workers in meta.released.items():
            if blocks := self.pins.landed(key, workers):
                self._pool.free_blocks(reversed(blocks))
        self._telling.late(self.pins.all_late_blocks)

    def _report(self, key: str, report: Report, workers: int) -> None:
        if report.late:
            self.pins.late(key)
        source, load = self._loads[key]
        if load.hear(report, workers) < self._workers:
            return
        del self._loads[key]
        wish, whole = self._wishes.get(load.request_id), load.whole()
        wanted = wish is not None and load in wish.loads
        in_vain = load.given_up and whole.failure is not None
        self._telling.ended(source, load, whole, wanted=wanted and not in_vain)
        if wish is None or not wanted:
            return
        wish.loads.remove(load)
        if whole.failure is not None:
            wish.broken = True
            self._parts.forget(load.request_id)
        if not in_vain:
            source.ended(load, whole)
        # Late, it takes at least so long. Of a part, windows and states are most, whatever its tokens are.
        if load.loads == 1 and (whole.failure is None or whole.late):
            self._choice.speeds.loaded(load.bid.parts, time.monotonic() - load.began)
        if wish.loads:
            return
        if wish.broken:
            wish.state = _State.FAILED
            self._headroom.forget(load.request_id)
            return
        wish.bidding.succeeded()
        self._brought[load.request_id] = wish.bidding
        self._settle(load.request_id, wish)
        self._telling.settled(load.request_id, load.span.total, load.span.prompt)

    def _give_up_beside(self, failed: Load) -> None:
        """A load has failed: nothing is wanted any more of what comes beside it, which is not to blame."""
        wish = self._wishes.get(failed.request_id)
        for load in wish.loads if wish is not None else ():
            if load is not failed and load.attempt == failed.attempt and not load.given_up:
                load.given_up |= all(report.failure is None for report in load.reports)
                self._given_up[load.key] = OTHER_PART
                self._loads[load.key][0].dropped(load)

    def _best(self, wish: _Wish, request: Any, have: int) -> int | None:
        """Tokens of the best bid, which is taken; None while it, or room, is waited for."""
        wish.crowded = False
        offers = self._offers(wish, request, have)
        now = time.monotonic()
        waited = wish.waiting.until(now)
        best = self._choice.of(
            wish.bidding.open((offer.bid for offer in offers), request.num_tokens - have),
            request.num_tokens - have,
            waited=waited,
            before=None if wish.taken is None else wish.taken[0].bid,
        )
        bids = [(offer.last, offer.bid) for offer in offers]
        self._telling.asked(request, wish.sources, wish.bidding, have, bids, best)
        if best is None:
            return 0
        if not best.looking:
            wish.taken = next(offer for offer in offers if offer.bid is best), have
            wish.crowded = not self._has_room(wish.taken[0], request, have)
            if not wish.crowded:
                return best.tokens
            if waited >= self._choice.patience_seconds:
                return 0
        wish.waiting.begin(now)
        return None

    def _offers(self, wish: _Wish, request: Any, have: int) -> list[Offer]:
        """What may be taken of what sources have."""
        found = offers_of(wish.sources, request, have, self._grain)
        return [offer for offer in found if not self._in_part(offer, request, have)]

    def _has_room(self, offer: Offer, request: Any, have: int) -> bool:
        """Whether loads of an offer leave the blocks that others need, now and if they are late."""
        tokens, total = request.num_tokens, have + offer.bid.tokens
        return self._headroom.fits(request.request_id, total, tokens) and all(
            source.room(bid, sum(most_written(*group, span) for group in self._blocks))
            for source, bid, span in offer.parts(have, offer.bid.tokens, tokens)
        )

    def _begin(self, wish: _Wish, request: Any, blocks: Any, external: int) -> None:
        """Begin the loads of what was taken, of which `external` tokens are not here."""
        assert wish.taken is not None
        offer, have = wish.taken
        parts = offer.parts(have, external, request.num_tokens)
        self._count += 1
        attempt = f"{request.request_id}#{self._count}"
        for number, (source, bid, span) in enumerate(parts):
            load = Load(
                f"{attempt}.{number}",
                request.request_id,
                attempt,
                len(parts),
                bid,
                span,
                self._tables(blocks.get_block_ids(), span),
                time.monotonic(),
            )
            wish.loads.append(load)
            self._loads[load.key] = source, load
            self._pin(load, blocks.blocks)
            source.begin(load, request)
            self._telling.began(source, load)
        self._parts.begin(request, load.tables, span, source.grains(load))

    def _in_part(self, offer: Offer, request: Any, have: int) -> bool:
        """The offer would fill a block in part where that must not be; of what is looked for nobody knows."""
        source, bid = offer.legs[-1]
        span = Span(have, have + offer.bid.tokens, request.num_tokens)
        load = Load("", request.request_id, "", 1, bid, span, (), 0.0)
        return not offer.bid.looking and self._parts.refuses(span, source.grains(load))

    def _settle(self, request_id: str, wish: _Wish) -> None:
        wish.state = _State.SERVED
        for source in wish.sources:
            source.settled(request_id)

    def _pin(self, load: Load, blocks: Sequence[Sequence[Any]]) -> None:
        """Take a reference to every block that the load may write."""
        held = [
            block
            for kind, group, of_group in zip(self._kinds, self._groups, blocks, strict=True)
            for block in of_group[written(kind, group.kv_cache_spec.block_size, load.span)]
            if not block.is_null
        ]
        self._pool.touch(held)
        self.pins.hold(load.key, load.source, held)

    def _tables(self, block_ids: BlockIds, span: Span) -> BlockIds:
        """Our block tables; a state group's only the block that will hold the snapshot."""
        return tuple(
            [ids[state_position(group.kv_cache_spec, span.total)]] if kind is GroupKind.STATE else list(ids)
            for kind, group, ids in zip(self._kinds, self._groups, block_ids, strict=True)
        )
