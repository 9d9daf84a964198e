"""What of running requests is stored, and when: over an engine whose blocks hold what was computed."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.adapters import Adapters
from kvferry.connector.events import StoreBegan, StoreEnded
from kvferry.connector.part_blocks import PartBlocks
from kvferry.connector.plain import PlainStep
from kvferry.connector.stream import EventStream
from kvferry.connector.tiers.progress import Progress
from kvferry.connector.tiers.prompts import Prompts
from kvferry.connector.tiers.store_orders import MOST_PINNED, StoreOrders
from kvferry.connector.tiers.storing import Storing
from kvferry.connector.worker.orders import MergedCopyReport
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of, length
from kvferry.geometry.layout import EngineShape, lay_out
from kvferry.geometry.store import LayerCache
from kvferry.planning.select import LoadSpan, first_attended
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from support.block_pool import BlockPool, request
from support.models import attention, model, state

CHUNK, BLOCK, REACH = 8, 4, 12
PAGE = 4096
WINDOW = LayerCache(GroupKind.SLIDING, REACH, attention().fields)
LOCAL = LayerCache(GroupKind.CHUNKED, 16, attention().fields)


def geometry(*stores):
    ranks = lay_out(model(*stores), EngineShape(1, (len(stores),), BLOCK, "LBHNC", 99))
    return ranks[0].groups, canonical_form_of(ranks, CHUNK)


PLAIN, WINDOWED, HYBRID, CHUNKED = (
    geometry(*stores)
    for stores in (
        [attention()],
        [attention(), WINDOW],
        [attention(), WINDOW, state()],
        [attention(), LOCAL],
    )
)


@pytest.fixture(autouse=True)
def _alignment_tokens(monkeypatch):
    monkeypatch.setattr(length, "WINDOW_ALIGNMENT_TOKENS", BLOCK)


class Engine:
    """Computes requests in steps, over a pool; a block remembers what was last computed into it.

    What it computes of a token depends on all tokens up to it; of a state block it remembers after which.
    """

    def __init__(self, shape=PLAIN, blocks=64, pages=4096, every=CHUNK):
        self.groups, self.canonical = shape
        self.pool = BlockPool(blocks)
        self.host = HostTier(
            pages * PAGE, [one.chunk_bytes for one in self.canonical.groups], EVICTION_POLICIES["lru"]
        )
        self.cache = ChunkCache(self.host, lambda _, size: memoryview(bytearray(size)), self.canonical.groups)
        self.prompts = Prompts(self.canonical, Adapters())
        self.parts = PartBlocks(self.groups, self.pool)
        self.stores = StoreOrders(self.cache, self.pool, self.canonical.labels, EventStream())
        self.storing = Storing(
            self.cache, self.prompts, self.canonical, self.groups, self.parts, self.stores, every
        )
        self.content = defaultdict(dict)  # block id -> position -> tokens
        self.tables = {}
        self.orders = []
        self.stored = set()  # (group, tokens) of what a chunk or a snapshot holds
        self.meant = {}

    def arrive(self, one):
        self.tables[one.request_id] = tuple([] for _ in self.groups)
        if self.prompts.add(one) is not None:
            self.storing.on_new_request(one)

    def table_ids(self, name):
        return tuple([block.block_id for block in table] for table in self.tables[name])

    def allocate(self, one, until):
        """Blocks for so many tokens; False if there are not enough."""
        for group, table in zip(self.groups, self.tables[one.request_id], strict=True):
            if group.kind is GroupKind.STATE:
                continue
            new = self.pool.allocate(max(-(-until // group.block_tokens) - len(table), 0))
            if new is None:
                return False
            table.extend(new)
        return True

    def let_go(self, one):
        """Blocks that the next token does not see become null."""
        for group, table in zip(self.groups, self.tables[one.request_id], strict=True):
            if group.kind not in (GroupKind.SLIDING, GroupKind.CHUNKED):
                continue
            next_ = one.num_computed_tokens
            seen = (
                next_ - group.attention_span + 1
                if group.kind is GroupKind.SLIDING
                else next_ // group.attention_span * group.attention_span
            )
            for at in range(min(max(seen, 0) // group.block_tokens, len(table))):
                if not table[at].is_null:
                    self.pool.free_blocks([table[at]])
                    table[at] = self.pool.blocks[0]

    def compute(self, one, first, last, right=10**9):
        """Write tokens [first, last) into blocks; from `right` on they are drafts that are refused."""
        for group, table in zip(self.groups, self.tables[one.request_id], strict=True):
            if group.kind is GroupKind.STATE:
                continue
            for at in range(first, last):
                block = table[at // group.block_tokens].block_id
                self.content[block][at % group.block_tokens] = (
                    tuple(one.truth[: at + 1]) if at < right else "refused"
                )

    def step(self, *work, snapshots=(), look=True):
        """A step: (request, tokens[, refused]) of each; False if there are not blocks enough."""
        for one, tokens, *_ in work:
            self.let_go(one)
            if not self.allocate(one, one.num_computed_tokens + tokens):
                return False
        offered = {}
        for one, tokens in snapshots:
            for number, group in enumerate(self.groups):
                if group.kind is GroupKind.STATE:
                    (block,) = self.pool.allocate(1)
                    self.tables[one.request_id][number].append(block)
                    self.content[block.block_id] = {0: tuple(one.truth[:tokens])}
                    offered.setdefault(one.request_id, []).append((number, block.block_id, tokens))
        scheduled = {one.request_id: tokens for one, tokens, *_ in work}
        tables = {name: self.table_ids(name) for name in scheduled}
        self.storing.schedule(PlainStep(tokens=scheduled, tables=tables, snapshots=offered))
        self.hand_over()
        for one, tokens, *refused in work:
            first = one.num_computed_tokens
            right = first + tokens - sum(refused)
            self.compute(one, first, first + tokens, right)
            one.num_computed_tokens = right
        return True

    def hand_over(self):
        for order in self.stores.take():
            self.orders.append(order)
            slots = self.stores._stores[order.key].slots
            self.meant[order.key] = {slot.offset: (slot.key, chunk.tokens) for slot, chunk in slots}

    def ranks_store(self, order=None, failure=None):
        """Ranks carry an order out, by default the first: blocks hold what the chunks are to hold."""
        order = order or self.orders[0]
        self.orders.remove(order)
        for piece in order.pieces:
            key, tokens = self.meant[order.key].pop(piece.offset)
            self.stored.add((piece.group, self.held(order, piece, key, tokens)))
        assert not self.meant.pop(order.key)
        assert self.stores.on_copied(MergedCopyReport(order.key, failure, (), 0.0))

    def held(self, order, piece, key, tokens):
        """What the blocks of a chunk hold: the tokens it ends with."""
        of = self.canonical.groups[piece.group]
        found = set()
        for stretch, group in zip(order.tables, self.groups, strict=True):
            if group.label != of.label:
                assert stretch is None
                continue
            table = stretch.table().tolist()
            if of.kind is GroupKind.STATE:
                assert (tokens, stretch.first, len(table)) == (0, 0, 1)
                found.add(self.content[table[0]][0])
                continue
            begin, last = piece.number * CHUNK, min((piece.number + 1) * CHUNK, order.available.stop)
            first = max(begin, order.available.start)
            assert tokens == last - begin
            alignment_tokens = length.content_alignment(of.kind, of.attention_span, CHUNK)
            assert (
                first == begin
                or first
                <= first_attended(of.kind, of.attention_span, last - 1) // alignment_tokens * alignment_tokens
            )
            held = [self.content[table[at // BLOCK]][at % BLOCK] for at in range(first, last)]
            assert held == [held[-1][: at + 1] for at in range(first, last)]
            found.add(held[-1])
        (ends,) = found
        chunks = Prompts(self.canonical, Adapters()).add(request("other", ends))
        end = (piece.number + 1) * CHUNK
        assert key == (
            chunks.key(piece.group, piece.number) if len(ends) == end else chunks.tail(piece.group, len(ends))
        )
        return ends

    def all_stored(self):
        while self.orders:
            self.ranks_store()

    def numbers(self):
        """(group, chunk) of what is ordered, and not carried out."""
        return [(piece.group, piece.number) for order in self.orders for piece in order.pieces]

    def free(self, one):
        for table in self.tables[one.request_id]:
            self.pool.free_blocks(block for block in table if not block.is_null)
            table.clear()

    def preempt(self, one):
        self.free(one)
        one.num_computed_tokens = 0
        one.num_preemptions += 1

    def finish(self, one):
        self.storing.finished(one, self.table_ids(one.request_id))
        self.prompts.remove(one.request_id)
        self.free(one)
        del self.tables[one.request_id]
        self.hand_over()

    def end(self):
        """Everything is over: nothing is pinned any more."""
        for name in list(self.tables):
            self.pool.free_blocks(b for table in self.tables.pop(name) for b in table if not b.is_null)
        self.all_stored()
        assert self.pool.references == 0
        assert not self.stores.busy
        assert self.stores._pinned == 0
        self.host.check_integrity()


def arrived(engine, tokens, prompt=None, name="a", known=None):
    one = request(name, tokens, prompt)
    one.truth = list(tokens)
    grow(one, known or len(tokens))
    engine.arrive(one)
    return one


def grow(one, tokens):
    """What was sampled has become known."""
    one.all_token_ids = one.truth[:tokens]
    one.num_tokens = tokens


def test_a_prompt_computed_in_steps_is_stored_chunk_by_chunk_and_its_tail_with_the_last():
    engine = Engine()
    one = arrived(engine, range(20))
    ordered = []
    for tokens in (5, 5, 9, 1):
        engine.step((one, tokens))
        ordered.append(engine.numbers())
        engine.all_stored()
    assert ordered == [[], [(0, 0)], [(0, 1)], [(0, 2)]]
    assert engine.stored == {(0, tuple(range(n))) for n in (8, 16, 20)}
    engine.end()


def ranked(engine):
    """Keys in host memory, what would leave first first."""
    return [engine.host._policy.evict() for _ in range(len(engine.host))]


@pytest.mark.parametrize("in_time", [True, False])
def test_when_a_request_has_ended_its_beginning_is_what_stays_longest(in_time):
    engine = Engine(WINDOWED, blocks=600)
    one = arrived(engine, range(36), 30)
    chunks = engine.prompts.get(one)
    cold = [chunks.key(1, 0)]  # no window reaches that far back
    keys = [key for key in chunks.all_keys(30) if key not in cold]
    for tokens in (16, 14, 6):
        engine.step((one, tokens))
        if in_time:
            engine.all_stored()
    engine.finish(one)
    while engine.orders:  # in whichever order ranks have done
        engine.ranks_store(engine.orders[-1])
    kept = [key for key in keys if engine.host.contains([key])[0]]
    assert len(kept) == 9
    assert ranked(engine) == cold + kept[::-1]


def cold_windows(engine):
    """Chunks of the windowed group that are evicted before all others, of the prompt range(200)."""
    chunks = engine.prompts.chunks_of(request("other", range(200)))
    return [n for n in range(25) if chunks.key(1, n) in engine.host._policy._cold]


def served(engine, tokens, prompt, steps, name="a", found=0, shared=0):
    """A request that finds so many tokens, of a prompt of whose full-attention chunks so many are cached."""
    one = arrived(engine, range(tokens), prompt, name)
    engine.prompts.get(one).shared_tokens = shared
    one.num_computed_tokens = found
    for number in steps:
        engine.step((one, number))
        engine.all_stored()
    yield
    engine.finish(one)
    engine.all_stored()
    yield


def test_windows_are_cold_that_neither_the_end_nor_what_was_found_nor_a_shared_prefix_needs():
    engine = Engine(WINDOWED, blocks=600)
    request = served(engine, 160, 160, (100, 60), shared=120)
    next(request)
    # Token 119 sees from 108 on, chunk 13; token 127 from 116 on, as all multiples of 128 are likely ends;
    # token 159 from 148 on, chunk 18.
    assert cold_windows(engine) == [*range(13), 16, 17]
    next(request)
    assert cold_windows(engine) == [*range(13), 16, 17]
    for _ in served(engine, 160, 160, (104,), name="b", found=56):  # token 55 sees from 44 on, chunk 5
        pass
    assert cold_windows(engine) == [*range(5), *range(7, 13), 16, 17]


def test_windows_of_an_answer_turn_cold_at_its_end_but_for_the_last():
    engine = Engine(WINDOWED, blocks=600)
    request = served(engine, 80, 20, (20, *(1,) * 60))
    next(request)
    assert cold_windows(engine) == [], "the answer may end at every chunk"
    next(request)
    # Token 15 sees from 4 on, token 19 from 8 on: chunks 0 to 2. Token 79 sees from 68 on, chunk 8.
    assert cold_windows(engine) == [3, 4, 5, 6, 7]


def test_what_a_request_found_and_neither_loaded_nor_stored_was_used_by_it():
    engine = Engine()
    for name in "ab":
        one = arrived(engine, range(*{"a": (16,), "b": (50, 66)}[name]), name=name)
        engine.step((one, 16))
        engine.all_stored()
        engine.finish(one)
    again = arrived(engine, range(16), name="again")
    keys = engine.prompts.get(again).all_keys(16)
    again.num_computed_tokens = 15  # the engine's own cache has it
    engine.allocate(again, 16)
    engine.compute(again, 0, 15)
    engine.step((again, 1))
    engine.finish(again)
    assert not engine.orders
    assert ranked(engine)[2:] == keys[::-1]


def test_after_a_reset_what_had_ended_before_is_not_ranked(monkeypatch):
    engine, used = Engine(), []
    monkeypatch.setattr(engine.cache, "mark_used", lambda *keys: used.append(keys))
    one = arrived(engine, range(16))
    engine.step((one, 16))
    engine.finish(one)
    engine.prompts.start_anew()
    engine.storing.start_anew()
    engine.all_stored()
    assert not used
    engine.end()


def test_what_decoding_completes_is_stored_when_its_tokens_are_known():
    engine = Engine()
    one = arrived(engine, range(30), 6, known=6)
    engine.step((one, 6))
    assert engine.numbers() == [(0, 0)]  # the tail
    engine.all_stored()
    for computed in range(6, 12):
        grow(one, computed)  # the token that is computed was sampled in the step before, which is under way
        engine.step((one, 1))
        assert engine.numbers() == ([(0, 0)] if computed == 8 else [])
        engine.all_stored()
    engine.end()


def test_tokens_that_are_refused_are_not_stored():
    engine = Engine()
    one = arrived(engine, range(30), 4, known=5)
    engine.step((one, 4))
    engine.all_stored()
    engine.step((one, 4, 3))  # one token and three drafts: as if tokens 4 to 7 were computed
    assert engine.numbers() == []
    grow(one, 6)
    engine.step((one, 3))
    grow(one, 9)
    engine.finish(one)
    engine.all_stored()
    assert engine.stored == {(0, tuple(range(4))), (0, tuple(range(8)))}
    engine.end()


def test_a_request_that_ends_with_a_refused_draft_does_not_store_it():
    engine = Engine()
    one = arrived(engine, range(30), 4, known=5)
    engine.step((one, 4))
    engine.all_stored()
    engine.step((one, 4, 1))
    grow(one, 8)  # the token in place of the draft has been sampled, not computed
    engine.finish(one)
    assert engine.numbers() == []
    engine.end()


def test_what_is_at_hand_is_not_stored_again():
    engine = Engine()
    engine.step((arrived(engine, range(16)), 16))
    engine.all_stored()
    engine.step((arrived(engine, [*range(16), *range(8)], name="b"), 24))
    assert engine.numbers() == [(0, 2)]
    engine.end()


def test_what_only_a_slow_tier_has_is_not_stored_again_if_it_was_found(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine.cache, "available", lambda keys: np.array([False, True, False])[: len(keys)])
    one = arrived(engine, range(24))
    engine.allocate(one, 24)
    engine.compute(one, 0, 23)
    one.num_computed_tokens = 23
    engine.step((one, 1))
    assert engine.numbers() == [(0, 0), (0, 2)]
    engine.end()


def test_what_is_computed_though_a_slow_tier_has_it_comes_to_host_memory(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(engine.cache, "available", lambda keys: np.ones(len(keys), np.bool_))
    one = arrived(engine, range(20))
    engine.allocate(one, 12)
    engine.compute(one, 0, 12)
    one.num_computed_tokens = 12
    engine.step((one, 8))
    assert engine.numbers() == [(0, 1), (0, 2)]
    engine.all_stored()
    engine.step((arrived(engine, range(16), name="b"), 16))
    assert engine.numbers() == [(0, 0)]
    engine.end()


def test_a_snapshot_comes_to_host_memory_though_a_slow_tier_has_it(monkeypatch):
    engine = Engine(HYBRID)
    monkeypatch.setattr(engine.cache, "available", lambda keys: np.ones(len(keys), np.bool_))
    for name in "ab":
        one = arrived(engine, range(20), name=name)
        engine.step((one, 8), snapshots=[(one, 8)])
        assert ((STATE_GROUP, 0) in engine.numbers()) == (name == "a")
        engine.all_stored()
    engine.end()


def test_what_is_being_stored_is_not_stored_twice():
    engine = Engine()
    engine.step((arrived(engine, range(16)), 16), (arrived(engine, range(16), name="b"), 16))
    assert engine.numbers() == [(0, 0), (0, 1)]
    assert engine.stores.chunks == 2
    engine.end()
    assert engine.stores.chunks == 0


def windows(engine):
    """Chunks of the window that are ordered."""
    return [number for group, number in engine.numbers() if engine.canonical.groups[group].attention_span]


def test_blocks_that_a_window_has_not_let_go_yet_are_stored():
    engine = Engine(WINDOWED, blocks=600)
    one = arrived(engine, range(40))
    for tokens in (20, 16, 4):
        engine.step((one, tokens))
    assert windows(engine) == [0, 1, 2, 3, 4]
    engine.end()


def test_what_a_window_has_let_go_of_is_not_needed_of_a_chunk():
    short = LayerCache(GroupKind.SLIDING, 4, attention().fields)
    engine = Engine(geometry(attention(), short))
    one = arrived(engine, range(24))
    engine.step((one, 7))
    engine.step((one, 9))  # token 7 sees from token 4 on: the first block has gone
    assert windows(engine) == [0, 1]
    for _ in range(8):  # decoding: half of every chunk has gone before its end comes
        engine.all_stored()
        engine.step((one, 1))
    assert windows(engine) == [2]
    assert [order.available for order in engine.orders] == [range(16, 24), range(20, 24)]
    engine.end()


@pytest.mark.parametrize(("alignment_tokens", "kept"), [(4, [0, 1]), (8, [1])])
def test_a_chunk_begins_where_readers_of_larger_blocks_count_on_it(monkeypatch, alignment_tokens, kept):
    monkeypatch.setattr(length, "WINDOW_ALIGNMENT_TOKENS", alignment_tokens)
    engine = Engine(geometry(attention(), LayerCache(GroupKind.SLIDING, 4, attention().fields)))
    one = arrived(engine, range(24))
    engine.step((one, 7))
    engine.step((one, 9))  # only [4, 8) of the first chunk is there
    assert windows(engine) == kept
    engine.end()


def test_blocks_that_a_load_filled_in_part_are_not_stored():
    engine = Engine(WINDOWED, blocks=600)
    one = arrived(engine, range(40))
    assert engine.allocate(one, 25)
    engine.parts.begin(one, engine.table_ids("a"), LoadSpan(0, 25, 40), (1, 1))  # 25 sees tokens from 14 on
    engine.step((one, 25))
    assert windows(engine) == [0, 2]
    engine.end()


def test_a_chunk_that_lacks_what_its_end_needs_is_not_stored():
    engine = Engine(geometry(attention(), LayerCache(GroupKind.SLIDING, 8, attention().fields)))
    one = arrived(engine, range(16))
    engine.step((one, 7))
    table = engine.tables["a"][1]
    engine.pool.free_blocks([table[0]])
    table[0] = engine.pool.blocks[0]
    engine.step((one, 9))
    assert windows(engine) == [1]
    engine.end()


@pytest.mark.parametrize(("ids", "there"), [([5, 6], True), ([5], False), ([5, 0], False), ([0, 6], False)])
def test_a_chunk_that_straddles_blocks_needs_all_of_them(ids, there):
    ranks = lay_out(model(attention()), EngineShape(1, (1,), 12, "LBHNC", 9))
    engine = Engine((ranks[0].groups, canonical_form_of(ranks, CHUNK)))
    assert engine.storing._first_storable_token(0, 1, (ids,), 2 * CHUNK, 0) == (CHUNK if there else None)


@pytest.mark.parametrize(
    ("found", "kept"),
    [(0, [0, 1, 2, 3, 4]), (16, [1, 2, 3, 4]), (20, [2, 3, 4]), (24, [2, 3, 4]), (32, [3, 4])],
)
def test_of_what_was_found_no_more_is_believed_than_a_window_looked_at(found, kept):
    stores = [LayerCache(GroupKind.SLIDING, CHUNK, attention().fields)]
    engine = Engine(geometry(*stores))
    one = arrived(engine, range(40))
    one.num_computed_tokens = found
    engine.tables["a"] = (engine.pool.allocate(40 // BLOCK),)
    engine.storing.schedule(PlainStep(tokens={"a": 40 - found}, tables={"a": engine.table_ids("a")}))
    engine.hand_over()
    assert [number for _, number in engine.numbers()] == kept


def test_what_a_preempted_request_computes_again_is_its_own():
    engine = Engine(WINDOWED, blocks=600)
    one = arrived(engine, range(40))
    one.num_computed_tokens = 16
    progress = engine.storing._progress["a"]
    engine.storing.schedule(PlainStep(tokens={"a": 1}, tables={"a": ([0] * 10, [0] * 10)}))
    assert progress.found == 16
    engine.preempt(one)
    engine.step((one, 20))
    assert progress.found == 0
    engine.end()


def test_a_local_prefix_is_stored_if_no_tier_has_it():
    engine = Engine()
    one = arrived(engine, range(24))
    engine.allocate(one, 16)
    engine.compute(one, 0, 16)
    one.num_computed_tokens = 16
    engine.step((one, 8))
    assert engine.numbers() == [(0, 0), (0, 1), (0, 2)]
    engine.end()


def test_what_ends_with_a_request_is_stored_from_blocks_that_it_no_longer_has():
    engine = Engine()
    one = arrived(engine, range(9), 3, known=3)
    engine.step((one, 3))
    engine.all_stored()
    for _ in range(5):
        engine.step((one, 1))
    grow(one, 9)
    engine.finish(one)
    assert engine.numbers() == [(0, 0)]
    assert engine.pool.references == 2, "pinned"
    engine.end()


def test_what_a_load_that_did_not_finish_was_to_bring_is_not_stored():
    engine = Engine()
    one = arrived(engine, range(40))
    engine.allocate(one, 32)
    one.num_computed_tokens = 32  # as the engine counts it while it is being loaded
    engine.finish(one)
    assert engine.numbers() == []
    engine.end()


def test_nor_after_a_preemption():
    engine = Engine()
    one = arrived(engine, range(40))
    engine.step((one, 10))
    engine.all_stored()
    engine.preempt(one)
    engine.allocate(one, 32)
    one.num_computed_tokens = 32
    engine.finish(one)
    assert engine.numbers() == []
    engine.end()


def test_a_request_that_was_preempted_stores_from_where_it_was():
    engine = Engine()
    one = arrived(engine, range(24))
    engine.step((one, 9))
    engine.preempt(one)
    engine.step((one, 20))
    assert engine.numbers() == [(0, 0), (0, 1)]
    engine.all_stored()
    engine.step((one, 4))
    assert engine.numbers() == [(0, 2)]
    engine.end()


def test_a_store_that_fails_is_forgotten_and_its_blocks_given_back():
    engine = Engine()
    engine.step((arrived(engine, range(16)), 16))
    engine.ranks_store(failure="a block is gone")
    assert (len(engine.host), engine.host.used_bytes) == (0, 0)
    assert engine.cache.counts.failed == 2
    engine.end()


def test_stores_hold_back_no_more_than_their_share_of_the_blocks():
    engine = Engine(blocks=64)
    most = int(MOST_PINNED * 64)
    one = arrived(engine, range(200))
    engine.step((one, most * BLOCK))
    assert engine.stores._pinned == most
    engine.step((one, CHUNK))
    assert engine.stores.dropped == {"too many stores under way": 1}
    engine.all_stored()
    engine.step((one, CHUNK))
    assert engine.numbers() == [(0, most * BLOCK // CHUNK + 1)]
    engine.end()


def test_a_pool_that_can_pin_one_chunk_at_a_time_stores_one():
    engine = Engine(blocks=11)
    assert engine.stores.most_pinned == CHUNK // BLOCK
    one = arrived(engine, range(24))
    engine.step((one, 2 * CHUNK))
    assert engine.numbers() == [(0, 0)]
    assert engine.stores.dropped == {"too many stores under way": 1}
    engine.end()


def test_what_finds_no_room_in_host_memory_pins_nothing():
    engine = Engine(pages=1)
    one = arrived(engine, range(24))
    engine.step((one, 8))
    assert engine.numbers() == [(0, 0)]
    engine.step((one, 16))
    assert engine.numbers() == [(0, 0)]
    assert engine.stores._pinned == 2
    engine.end()


def test_requests_without_names_are_not_stored():
    engine = Engine()
    one = request("a", range(16), mm_features=[], prompt_embeds=object())
    one.truth = list(range(16))
    engine.arrive(one)
    engine.step((one, 16))
    engine.finish(one)
    assert not engine.orders
    engine.end()


def test_after_a_reset_nothing_of_running_requests_is_stored():
    engine = Engine()
    one = arrived(engine, range(24))
    engine.step((one, 8))
    engine.prompts.start_anew()
    engine.storing.start_anew()
    engine.cache.clear()
    engine.step((one, 8))
    assert len(engine.orders) == 1
    engine.all_stored()
    assert len(engine.host) == 0
    engine.end()


STATE_GROUP = next(n for n, group in enumerate(HYBRID[1].groups) if group.kind is GroupKind.STATE)


def test_snapshots_at_the_ends_of_chunks_are_stored_and_there_are_no_tails():
    engine = Engine(HYBRID)
    one = arrived(engine, range(20))
    engine.step((one, 8), snapshots=[(one, 8)])
    engine.step((one, 4), snapshots=[(one, 12)])
    engine.step((one, 8), snapshots=[(one, 16)])
    engine.all_stored()
    assert {(group, len(ends)) for group, ends in engine.stored} == {
        (group, tokens) for group in range(3) for tokens in (8, 16)
    }
    engine.end()


def test_a_snapshot_of_some_layers_only_is_not_stored():
    engine = Engine(HYBRID)
    engine.storing._parts[STATE_GROUP].append(99)  # layers of another group that left none
    engine.step((arrived(engine, range(8)), 8))
    one = engine.storing._progress["a"].request
    engine.storing._store_snapshots(one, [(2, 7, 8)])
    assert STATE_GROUP not in [group for group, _ in engine.numbers()]
    engine.end()


def test_snapshots_of_a_request_whose_tokens_are_not_known_yet_are_not_stored():
    engine = Engine(HYBRID)
    one = arrived(engine, range(20), 6, known=7)
    engine.step((one, 6), snapshots=[(one, 8)])
    assert STATE_GROUP not in [group for group, _ in engine.numbers()]
    engine.end()


def test_with_fewer_snapshots_those_at_multiples_and_the_prompts_last_are_kept():
    engine = Engine(HYBRID, every=2 * CHUNK)
    one = arrived(engine, range(60), 44)
    for end in range(CHUNK, 57, CHUNK):
        engine.step((one, CHUNK), snapshots=[(one, end)])
        engine.all_stored()
    assert {len(ends) for group, ends in engine.stored if group == STATE_GROUP} == {16, 32, 40, 48}
    engine.end()


@pytest.mark.parametrize("shape", [WINDOWED, CHUNKED, HYBRID])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("prompt", [40, 44, 64])
def test_where_a_prefix_may_end_everything_is_kept_that_it_takes(shape, every, prompt):
    engine = Engine(shape, blocks=600, every=every * CHUNK)
    tokens = list(range(90))
    one = arrived(engine, tokens, prompt)
    for end in range(CHUNK, 81, CHUNK):
        engine.step((one, CHUNK), snapshots=[(one, end)] if shape is HYBRID else ())
        engine.all_stored()

    def found(length):
        chunks = Prompts(engine.canonical, Adapters()).add(request("b", [*tokens[:length], 999]))
        return chunks.look_up(length + 1, 0, engine.cache.reading.tier_numbers).tokens

    for end in {*range(every * CHUNK, 81, every * CHUNK), prompt // CHUNK * CHUNK}:
        assert found(end) == end, "others go on from there"
    whole = Prompts(engine.canonical, Adapters()).add(request("b", tokens[:prompt]))
    farthest = (prompt - 1) // CHUNK * CHUNK if shape is HYBRID else prompt
    again = whole.look_up(prompt, 0, engine.cache.reading.tier_numbers)
    assert again.tokens == farthest, "and the same prompt from where it can"
    engine.end()


def test_windows_between_the_places_where_a_prefix_may_end_are_not_kept():
    engine = Engine(WINDOWED, blocks=600, every=8 * CHUNK)
    one = arrived(engine, range(160))
    engine.step((one, 160))
    assert windows(engine) == [6, 7, 14, 15, 18, 19]
    assert len(engine.numbers()) == 20 + 6, "of full attention all"
    engine.end()


WORDS = [[n * 100 + at for at in range(60)] for n in range(2)]


class Serving(RuleBasedStateMachine):
    """Requests of few texts in an engine with few blocks, whose ranks are late; every store is checked."""

    @initialize(blocks=st.integers(30, 90), pages=st.integers(4, 20), every=st.integers(1, 3))
    def make(self, blocks, pages, every):
        self.engine = Engine(WINDOWED, blocks, pages, every * CHUNK)
        self.running, self.loading, self.arrivals = [], [], 0

    @rule(text=st.sampled_from(WORDS), same=st.integers(0, 60), prompt=st.integers(1, 40))
    def arrive(self, text, same, prompt):
        self.arrivals += 1
        tokens = text[:same] + [self.arrivals * 1000 + at for at in range(60 - same)]
        one = arrived(self.engine, tokens, prompt, f"r{self.arrivals}", known=prompt)
        self.running.append(one)

    def pick(self, data, of):
        return of[data.draw(st.integers(0, len(of) - 1))]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 20), drafts=st.integers(0, 3), lag=st.integers(0, 2))
    def step(self, data, tokens, drafts, lag):
        one = self.pick(data, self.running)
        left = one.num_prompt_tokens - one.num_computed_tokens
        refused = 0
        if left > 0:
            tokens = min(tokens, left)
        else:
            tokens = min(1 + drafts, 60 - one.num_computed_tokens)
            refused = data.draw(st.integers(0, max(tokens - 1, 0)))
        if tokens <= 0:
            return
        if not self.engine.step((one, tokens, refused)):
            self.engine.preempt(one)
            return
        known = min(one.num_computed_tokens + 1 - lag, 60)
        grow(one, max(known, one.num_tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.engine.preempt(self.pick(data, self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        one = self.pick(data, self.running)
        self.running.remove(one)
        self.engine.finish(one)

    @precondition(lambda self: any(not one.num_computed_tokens for one in self.running))
    @rule(data=st.data(), tokens=st.integers(1, 40))
    def load(self, data, tokens):
        """Blocks for what is being loaded; the engine counts it as computed."""
        one = self.pick(data, [one for one in self.running if not one.num_computed_tokens])
        tokens = min(tokens, one.num_tokens)
        if self.engine.allocate(one, tokens):
            self.running.remove(one)
            self.loading.append(one)
            one.num_computed_tokens = tokens
        else:
            self.engine.preempt(one)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), how=st.sampled_from(["ready", "failed", "aborted"]))
    def load_ends(self, data, how):
        one = self.pick(data, self.loading)
        self.loading.remove(one)
        if how == "aborted":
            self.engine.finish(one)
            return
        self.running.append(one)
        if how == "failed":
            self.engine.preempt(one)
        else:
            self.engine.compute(one, 0, one.num_computed_tokens)

    @precondition(lambda self: self.engine.orders)
    @rule(data=st.data(), well=st.booleans())
    def ranks_store(self, data, well):
        self.engine.ranks_store(self.pick(data, self.engine.orders), None if well else "no")

    @rule()
    def forget_host_memory(self):
        self.engine.cache.clear()

    @invariant()
    def pins_are_those_of_orders(self):
        if hasattr(self, "engine"):
            engine = self.engine
            pinned = sum(len(store.blocks) for store in engine.stores._stores.values())
            tables = [b for tables in engine.tables.values() for t in tables for b in t if not b.is_null]
            assert engine.pool.references == pinned + len(tables)
            assert engine.stores._pinned == pinned <= MOST_PINNED * len(engine.pool.blocks)
            engine.host.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.end()


TestServing = Serving.TestCase
TestServing.settings = settings(
    deadline=None, derandomize=True, database=None, max_examples=150, stateful_step_count=40
)


def test_of_a_request_that_was_preempted_and_ends_while_it_is_loaded_nothing_is_stored():
    engine = Engine()
    one = arrived(engine, range(24), known=9)
    engine.step((one, 16))  # the second chunk is computed, its tokens are not known yet
    engine.all_stored()
    engine.preempt(one)
    grow(one, 24)
    assert engine.allocate(one, 16)
    one.num_computed_tokens = 16  # what a load is to bring into these blocks
    engine.finish(one)
    assert engine.numbers() == []
    engine.end()


def test_stores_are_told_from_beginning_to_end():
    engine, heard = Engine(), []
    engine.stores._events.subscribe(heard.append)
    one = arrived(engine, range(20))
    engine.step((one, 20))
    began = [event for event in heard if isinstance(event, StoreBegan)]
    assert [(event.request_id, event.group) for event in began] == [("a", "0 full_attention")] * len(began)
    assert sum(event.chunks for event in began) == 3
    assert heard == began
    engine.all_stored()
    ended = heard[len(began) :]
    assert {event.store for event in ended} == {event.store for event in began}
    assert {(type(event), event.request_id, event.failure) for event in ended} == {(StoreEnded, "a", "")}


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(1, 3), min_size=3, max_size=3),  # tokens of each request
            st.sampled_from([[1, 1, 1]] * 4 + [[0, 1, 1], [1, 0, 1]]),
            st.sampled_from(["preempt", "finish", "reset"]),
        ),
        max_size=60,
    )
)
def test_steps_without_a_look_at_each_request_store_what_looks_would(work):
    looking, counting = Engine(blocks=400), Engine(blocks=400)
    looking.storing._quiet.count = lambda *_: False
    stored = []
    for engine in (looking, counting):
        numbers = itertools.count()
        running = [arrived(engine, range(at, at + 200), 6, f"r{next(numbers)}") for at in (0, 300, 600)]
        for one in work:
            if one == "preempt":
                engine.preempt(running[0])
                engine.step((running[1], 1))
            elif one == "finish":
                engine.finish(running[0])
                at = 1000 * (1 + next(numbers))
                running = [*running[1:], arrived(engine, range(at, at + 200), 6, f"r{at}")]
            elif one == "reset":
                engine.storing.start_anew()
            else:
                engine.step(*((r, tokens) for r, tokens in zip(running, one, strict=True) if tokens))
            stored.append((engine, engine.numbers()))
            engine.all_stored()
    half = len(stored) // 2
    assert [numbers for _, numbers in stored[:half]] == [numbers for _, numbers in stored[half:]]


def test_a_step_in_which_no_chunk_ends_does_not_look_at_each_request(monkeypatch):
    engine, looks = Engine(), []
    one = arrived(engine, range(200), 8)
    engine.step((one, 8))
    engine.all_stored()
    monkeypatch.setattr(Progress, "step", lambda *_: looks.append(one.num_computed_tokens) or True)
    for _ in range(8):
        engine.step((one, 1))
    assert looks == [15]


def test_a_new_request_with_the_id_of_an_ended_one_is_looked_at():
    engine = Engine()
    one = arrived(engine, range(200), 9)
    for tokens in (9, 1):
        engine.step((one, tokens))
    engine.finish(one)
    engine.all_stored()
    other = arrived(engine, range(300, 500), 8)
    engine.allocate(other, 7)
    engine.compute(other, 0, 7)
    other.num_computed_tokens = 7
    engine.step((other, 1))
    assert engine.numbers() == [(0, 0)]
