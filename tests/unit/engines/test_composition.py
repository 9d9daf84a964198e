"""Tokens that two sources load together, from bids to the cells of both loads, against a model by token.

Both sources are real: tiers over a list of the tiers that have chunks, and a peer over an offer. Chunks and
the blocks of the engine and its peer have any length. Block ids are positions + 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import event, given, strategies as st

from kvferry.connector.content import Adapters, Prompts
from kvferry.connector.events import EventStream
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.source import common_alignment, load_plans
from kvferry.connector.tiers.source import TierSource
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of, chunk_pool
from kvferry.planning.chunk_cells import cells_to_load
from kvferry.planning.coverage import NO_TIER
from kvferry.planning.select import Cells, LoadSpan, select_cells, unfilled_cells, writable_blocks
from kvferry.planning.template import Route, build_templates
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import PeerInfo
from kvferry.transport.offer import Offer, write_offer
from kvferry.transport.redeem import Grant, Redeemed
from support.block_pool import request
from support.examples import examples
from support.loads import made_up_load
from support.pages import kv_page, state_page
from transport.cards import facts, ticket

FULL, SLIDING, CHUNKED, MLA, STATE = (
    GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.MLA, GroupKind.STATE
)  # fmt: skip
SEES_ALL = (FULL, MLA)
BLOCKS = 99
"""In every pool: more than any prompt has."""


def rank(kinds: Sequence[tuple[GroupKind, int]], blocks: Sequence[int], address: int) -> RankGeometry:
    """An engine of one rank whose groups have a layer each."""
    groups, at = [], address
    for number, ((kind, attention_span), tokens) in enumerate(zip(kinds, blocks, strict=True)):
        page = state_page(1) if kind is STATE else kv_page(tokens, heads=1, width=1, item=1)
        groups.append(
            Group(kind, tokens, attention_span, (Layer(f"layers.{number}", at, page.page_bytes, page),))
        )
        at += BLOCKS * page.page_bytes
    return RankGeometry(0, 1, 0, 1, BLOCKS, tuple(groups), (Region(address, at - address),))


@dataclass(frozen=True)
class Case:
    """A prompt, and who has what of it.

    Attributes:
        kinds: kind and attention_span of every group.
        ours, theirs: tokens of a block, by group, of the engine and of its peer.
        chunk_tokens: of the tiers.
        prompt, offered, local_tokens: tokens of the prompt, of which the peer offers so many, and are here.
        since: how many times more of the prompt comes to be here until the loads begin.
        rows: by canonical group, where its chunks are.
        peer_first: the peer is asked first.
    """

    kinds: list[tuple[GroupKind, int]]
    ours: list[int]
    theirs: list[int]
    chunk_tokens: int
    prompt: int
    offered: int
    local_tokens: int
    since: int
    rows: np.ndarray
    peer_first: bool

    @property
    def stateful(self) -> bool:
        return any(kind is STATE for kind, _ in self.kinds)

    @property
    def step(self) -> int:
        """What is here of a prompt ends between blocks of all groups."""
        return lcm(*self.ours)

    @cached_property
    def rank(self) -> RankGeometry:
        return rank(self.kinds, self.ours, 1 << 40)

    @cached_property
    def canonical(self) -> CanonicalForm:
        return canonical_form_of([self.rank], self.chunk_tokens)

    def looked_at(self, group: int, end: int, here: int) -> set[int]:
        """Tokens that are not here, and that the first token to be computed after `end` looks at."""
        (kind, attention_span), following = self.kinds[group], end if end < self.prompt else self.prompt - 1
        return {
            token
            for token in range(here, end)
            if kind in SEES_ALL
            or (kind is SLIDING and following - token < attention_span)
            or (kind is CHUNKED and following // attention_span == token // attention_span)
        }


@st.composite
def cases(draw: Any) -> Case:
    kinds = [
        (kind, draw(st.integers(1, 40)) if kind in (SLIDING, CHUNKED) else 0)
        for kind in draw(
            st.lists(st.sampled_from((FULL, SLIDING, CHUNKED, MLA, STATE)), min_size=1, max_size=4)
        )
    ]
    kinds.insert(draw(st.integers(0, len(kinds))), (draw(st.sampled_from(SEES_ALL)), 0))
    sizes = st.lists(st.sampled_from((4, 6, 8, 16)), min_size=len(kinds), max_size=len(kinds))
    ours, theirs = draw(sizes), draw(sizes)
    chunk_tokens = draw(st.sampled_from((2, 4, 5, 6, 8, 16)))
    prompt = draw(st.integers(20, 120))
    step, last = lcm(*ours), prompt - any(kind is STATE for kind, _ in kinds)
    local_tokens = step * draw(st.integers(0, (prompt - 1) // step // 2))
    offered = draw(st.one_of(st.just(last), st.integers(1, last), st.integers(max(1, last - 2), last)))
    canonical, chunks = len({*kinds}), -(-prompt // chunk_tokens)
    rows = np.array([draw(row(chunks)) for _ in range(canonical)], np.int64)
    since = draw(st.sampled_from((0, 0, 1, 2)))
    return Case(
        kinds, ours, theirs, chunk_tokens, prompt, offered, local_tokens, since, rows, draw(st.booleans())
    )


@st.composite
def row(draw: Any, chunks: int) -> list[int]:
    """A beginning, an end, all, or all but a few: so that something can be put together."""
    tier_numbers = draw(st.lists(st.integers(0, 2), min_size=chunks, max_size=chunks))
    cut, how = draw(st.integers(0, chunks)), draw(st.sampled_from(("all", "all", "before", "after", "but")))
    gone = draw(st.sets(st.integers(0, chunks - 1), max_size=2)) if how == "but" else set()
    return [
        NO_TIER if number in gone or (how == "before" and number >= cut) or (how == "after" and number < cut)
        else place
        for number, place in enumerate(tier_numbers)
    ]  # fmt: skip


class Chunks:
    """A cache that says where chunks are, and notes what is fetched."""

    ranked, searched = ("host", "file", "object"), None

    def __init__(self, rows: np.ndarray) -> None:
        self._rows, self.wanted_chunks = rows, []

    def tier_numbers(self, tags: np.ndarray, without: set[str]) -> np.ndarray:
        assert not without
        return self._rows[:, : len(tags) // len(self._rows)].ravel()

    def fetch(self, wanted_chunks: Any, without: set[str]) -> SimpleNamespace:
        self.wanted_chunks = list(wanted_chunks)
        return SimpleNamespace()


class Client:
    """A control client that knows the peer."""

    def __init__(self, peer: RankGeometry, granted: Redeemed) -> None:
        self._known = PeerInfo(facts("engine", 11), (SimpleNamespace(geometry=peer),))
        self._granted = granted

    def look_up(self, address: Any, incarnation: int | None = None) -> PeerInfo:
        return self._known

    def redeem(self, address: Any, ticket: bytes, tokens: int, content: Any, **_: Any) -> Any:
        return SimpleNamespace(complete=None)

    def answer(self, claim: int, wait_seconds: float) -> Redeemed:
        return self._granted


@dataclass
class Brought:
    """What one load brings of one group.

    Attributes:
        tokens: how often each is written.
        cells: tokens of each cell.
        blocks: positions of blocks that are written.
        cleared: positions of blocks of which the rest is zeroed.
        snapshots: where each snapshot stands.
    """

    tokens: Counter[int] = field(default_factory=Counter)
    cells: list[range] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    snapshots: list[int] = field(default_factory=list)

    def take(self, route: Route, cells: Cells, tier_numbers: Sequence[int]) -> None:
        """So many cells more; `tier_numbers` are positions of what source ids mean."""
        for src, dst, cell in zip(cells.src_block, cells.dst_block, cells.dst_number.tolist(), strict=True):
            assert (cell // route.src_cells, cell // route.dst_cells) == (tier_numbers[src - 1], dst - 1)
            self.cells.append(range(cell * route.cell_tokens, (cell + 1) * route.cell_tokens))
            self.tokens.update(self.cells[-1])
            self.blocks.add(int(dst) - 1)


class TwoSources:
    """Tiers and a peer, for one request."""

    def __init__(self, case: Case) -> None:
        self.case, self.one = case, request("a", range(case.prompt))
        theirs = rank(case.kinds, case.theirs, 1 << 50)
        (self._from_peer,) = build_templates([theirs], case.rank)
        pools = [chunk_pool(case.canonical, n, 0, BLOCKS) for n in range(len(case.canonical.groups))]
        self._from_pools = build_templates(pools, case.rank)
        self.cache = Chunks(case.rows)
        self.tiers = TierSource(
            self.cache,
            Prompts(case.canonical, Adapters()),
            case.rank.groups,
            case.canonical,
            EventStream(),
            workers=1,
            most_loads=32,
        )
        turns: set[str] = set()
        loads = SimpleNamespace(late_blocks=lambda _: 0)
        client = Client(theirs, Redeemed(0, Grant.of(LeaseWord(3, 7, 11), 1 << 20, self._tables())))
        self.peer = PeerSource(
            client,
            ranks=[case.rank],
            loads=loads,
            events=EventStream(),
            timeout_seconds=30.0,
            most_held=2,
            turns=turns,
            adapters=Adapters(),
            idle=lambda: False,
        )
        self.one.kv_transfer_params = write_offer(
            Offer("engine", "127.0.0.1", 5600, ticket("theirs").hex(), case.offered, 0)
        )
        excluded = {}
        assert self.tiers.arrived(self.one, excluded)
        assert self.peer.arrived(self.one, excluded)
        self.sources = [self.peer, self.tiers] if case.peer_first else [self.tiers, self.peer]
        self.alignment_tokens = common_alignment((one.kind, one.block_tokens) for one in case.rank.groups)

    def offers(self) -> list[Any]:
        local_tokens = self.case.local_tokens
        answers = [(source, source.ask(self.one, local_tokens)) for source in self.sources]
        return load_plans(answers, local_tokens, self.alignment_tokens)

    def loads(self, offer: Any, here: int) -> list[tuple[LoadSpan, list[Brought]]]:
        """What each load of an offer brings, by group; `here` tokens are here by now."""
        case, found = self.case, []
        tables = tuple([1] if kind is STATE else list(range(1, BLOCKS)) for kind, _ in case.kinds)
        parts = offer.parts(case.local_tokens, case.local_tokens + offer.bid.tokens - here, case.prompt)
        for source, bid, span in parts:
            load = made_up_load(f"a#{len(found)}", span, tables, attempt="a", loads=len(parts), bid=bid)
            feed = source.begin(load, self.one)
            found.append((span, self._read(span, feed) if source is self.peer else self._fetched(span)))
        return found

    def _tables(self) -> list[list[int]]:
        """Of blocks that the peer has no more there is nothing in its tables."""
        case, tables = self.case, []
        for number, ((kind, _), size) in enumerate(zip(case.kinds, case.theirs, strict=True)):
            kept = {token // size for token in case.looked_at(number, case.offered, 0)}
            ids = [at + 1 if at in kept else 0 for at in range(-(-case.offered // size))]
            tables.append([1] if kind is STATE else ids)
        return tables

    def _read(self, span: LoadSpan, feed: Any) -> list[Brought]:
        ((order, last),) = [(part.work, part.last) for part in feed.next_parts()]
        assert (order.span, last) == (span, True)
        found = [Brought() for _ in self.case.kinds]
        for route in self._from_peer.routes:
            group, to = self.case.rank.groups[route.dst_group], found[route.dst_group]
            table = np.array(order.dst_tables[route.dst_group])
            cells = select_cells(
                route,
                group,
                span,
                np.array(order.src_tables[route.src_group]),
                table,
            )
            if route.cell_tokens:
                to.take(route, cells, range(BLOCKS))
                to.cleared |= set((unfilled_cells(route, group, span, table)[0] - 1).tolist())
            else:
                to.snapshots += [self.case.offered] * len(cells)
        return found

    def _fetched(self, span: LoadSpan) -> list[Brought]:
        case, found = self.case, [Brought() for _ in self.case.kinds]
        numbers = defaultdict[int, list[int]](list)
        for want in self.cache.wanted_chunks:
            assert case.rows[want.group, want.number] < NO_TIER, "it is nowhere"
            numbers[want.group].append(want.number)
        for canonical, (of, template) in enumerate(zip(case.canonical.groups, self._from_pools, strict=True)):
            for route in template.routes:
                group, to = case.rank.groups[route.dst_group], found[route.dst_group]
                chunks = numbers[canonical]
                table = np.array((1,) if of.kind is STATE else range(1, BLOCKS))
                if route.cell_tokens:
                    to.cleared |= set((unfilled_cells(route, group, span, table)[0] - 1).tolist())
                if not chunks:
                    continue
                for cells in cells_to_load(route, case.chunk_tokens, group, span, chunks, table):
                    if route.cell_tokens:
                        to.take(route, cells, chunks)
                    else:
                        to.snapshots += [(number + 1) * case.chunk_tokens for number in chunks]
        return found


@examples(200)
@given(cases())
def test_loads_of_an_offer_bring_exactly_the_attended_tokens_once(case: Case) -> None:
    sources = TwoSources(case)
    for offer in sources.offers():
        end = case.local_tokens + offer.bid.tokens
        here = case.local_tokens + case.step * case.since
        if here >= end:
            here = case.local_tokens
        loads = sources.loads(offer, here)
        for number, ((kind, attention_span), size) in enumerate(zip(case.kinds, case.ours, strict=True)):
            each = [brought[number] for _, brought in loads]
            if kind is STATE:
                assert [one.snapshots for one in each] == [[]] * (len(each) - 1) + [[end]]
                continue
            needed, times = case.looked_at(number, end, here), Counter[int]()
            for one in each:
                times.update(one.tokens)
            assert needed <= times.keys(), "a gap"
            assert set(times.values()) <= {1}, "a token comes twice"
            assert all(needed.intersection(cell) for one in each for cell in one.cells), "nobody looks at it"
            assert min(times, default=here) >= here, "what is here is written over"
            touched = Counter(block for one in each for block in one.blocks | one.cleared)
            assert set(touched.values()) <= {1}, "both parts write to a block"
            for (span, _), one in zip(loads, each, strict=True):
                pinned = range(BLOCKS)[writable_blocks(Group(kind, size, attention_span, ()), span)]
                assert one.blocks | one.cleared <= {*pinned}, "it is nobody's when it is written"
                if kind in SEES_ALL:
                    assert {span.begins % size, (span.ends - end) and span.ends % size} == {0}
        since = "more" if here > case.local_tokens else "no more"
        event(f"{len(offer.source_bids)} in {len(loads)}, {since} has come since")


def boundaries(case: Case) -> list[int]:
    """Where a prefix from tiers may end: after chunks; at the end of the prompt if all may be loaded."""
    last = case.prompt
    for (kind, attention_span), size in zip(case.kinds, case.ours, strict=True):
        firsts = {
            at // attention_span * attention_span if kind is CHUNKED else max(0, at - attention_span + 1)
            for at in (last - 1, last)
        }
        if attention_span and len({first // size for first in firsts}) > 1:
            last -= 1  # of the block before the last one's window the engine has let go
            break
    ends = [*range(case.chunk_tokens, last + 1, case.chunk_tokens)]
    if last == case.prompt and not case.stateful:
        ends.append(last)
    return [end for end in {*ends} if end > case.local_tokens and not (case.stateful and end == case.prompt)]


def lacks(case: Case, group: int, end: int, first: int) -> bool:
    """Some chunk that a prefix up to `end` takes of a group is nowhere; before `first` others bring it."""
    kind, _ = case.kinds[group]
    tokens = {end - 1} if kind is STATE else case.looked_at(group, end, case.local_tokens)
    if kind in SEES_ALL:
        tokens -= {*range(first)}
    of = case.canonical.index(case.rank.groups[group].label)
    return any(case.rows[of, token // case.chunk_tokens] == NO_TIER for token in tokens)


@given(cases())
def test_every_prefix_that_two_sources_have_together_is_offered(case: Case) -> None:
    sources = TwoSources(case)
    found = {
        (
            offer.source_bids[0][0].name,
            case.local_tokens + offer.source_bids[0][1].tokens,
            case.local_tokens + offer.bid.tokens,
        )
        for offer in sources.offers()
        if len(offer.source_bids) == 2
    }
    groups, expected = range(len(case.kinds)), set()
    seeing = [number for number in groups if case.kinds[number][0] in SEES_ALL]
    alignment_tokens = lcm(*(case.ours[number] for number in seeing))
    begun = min(
        max((end for end in boundaries(case) if not lacks(case, number, end, 0)), default=case.local_tokens)
        for number in seeing
    )
    if case.local_tokens < (meeting := begun // alignment_tokens * alignment_tokens) < case.offered:
        expected.add((sources.tiers.name, meeting, case.offered))
    meeting = case.offered // alignment_tokens * alignment_tokens
    ends = [
        end
        for end in boundaries(case)
        if end > meeting and not any(lacks(case, number, end, meeting) for number in groups)
    ]
    if meeting > case.local_tokens and ends:
        expected.add((sources.peer.name, meeting, max(ends)))
    assert found == expected
    event(f"{len(found)} ways")
