"""Storing chunks of running requests, over an engine whose blocks remember what was computed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.connector.blocks import PartBlocks
from kvferry.connector.content import Adapters, Prompts
from kvferry.connector.engine import CacheGroup, PlainStep
from kvferry.connector.events import StoreBegan, StoreEnded
from kvferry.connector.messages import StepReports
from kvferry.connector.tiers.storing import MOST_PINNED, StoreOrders, Storing
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of, derive as length
from kvferry.planning.select import LoadSpan, first_attended
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from kvferry.transport.read_plan import Report
from support.block_pool import MadeUpRequest, request
from support.examples import examples
from support.fake_engine import FakeEngine, PartialHalf, events_of
from support.models import attention, model, state
from support.slow_tiers import fake_tiers, queue_by_hand, table_of

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


class RecordedCache(ChunkCache):
    """Remembers the key of each slot, the tokens that were stored there, and the chunks marked as used."""

    def __init__(self, *given):
        super().__init__(*given)
        self.reserved, self.tokens, self.used = {}, {}, []

    def reserve(self, key, group):
        slot = super().reserve(key, group)
        if slot is not None:
            self.reserved[slot.offset] = key
        return slot

    def filled(self, slot, tokens, failure, *, cold=False, prompt_tokens=None):
        self.tokens[slot.offset] = tokens
        super().filled(slot, tokens, failure, cold=cold, prompt_tokens=prompt_tokens)

    def mark_used(self, keys, cold=(), tokens=0, prompt_tokens=0):
        self.used.append(keys)
        super().mark_used(keys, cold, tokens, prompt_tokens)


def storing(shape=PLAIN, blocks=64, pages=4096, every=CHUNK, slow=()) -> FakeEngine:
    """An engine that stores chunks, with a slow tier that has the chunks of these keys.

    `orders` are not carried out yet. `stored` has (group, tokens) of each chunk that the ranks have stored.
    """
    groups, canonical = shape
    engine = FakeEngine(
        [
            CacheGroup(
                kind=group.kind,
                attention_span=group.attention_span,
                block_tokens=group.block_tokens,
                state_block_tokens=group.block_tokens if group.kind is GroupKind.STATE else 0,
            )
            for group in groups
        ],
        blocks=blocks,
    )

    def policy(capacity_bytes):
        engine.policy = EVICTION_POLICIES["lru"](capacity_bytes)
        return engine.policy

    engine.groups, engine.canonical = groups, canonical
    tiers = fake_tiers([(key, b"") for key in slow]) if slow else []
    engine.host = HostTier(
        pages * PAGE, [one.chunk_bytes for one in canonical.groups], policy, table_of(tiers)
    )
    engine.cache = RecordedCache(
        engine.host,
        lambda _, size: memoryview(bytearray(size)),
        canonical.groups,
        [queue_by_hand(tier, engine.clock) for tier in tiers],
    )
    engine.prompts = Prompts(canonical, engine.adapters)
    engine.parts = PartBlocks(groups, engine.pool)
    engine.stores = StoreOrders(engine.cache, engine.pool, 1, canonical.labels, engine.events)
    engine.storing = Storing(
        engine.cache, engine.prompts, canonical, groups, engine.parts, engine.stores, every
    )
    engine.half = PartialHalf(prompts=engine.prompts, storing=engine.storing, stores=engine.stores)
    engine.orders, engine.stored = [], set()
    return engine


def arrived(engine, tokens, prompt=None, name="a", known=None):
    one = request(name, tokens, prompt)
    one.truth = list(tokens)
    grow(one, known or len(tokens))
    return engine.arrive(one)


def grow(one, tokens):
    """Make sampled tokens known."""
    one.all_token_ids = one.truth[:tokens]
    one.num_tokens = tokens


def step(engine, *work, snapshots=()):
    """Run a step; return False if there are too few blocks."""
    orders = engine.step(*work, snapshots=snapshots)
    if orders is not None:
        engine.orders += orders.stores
    return orders is not None


def schedule(engine, one, tokens, ids, snapshots=()):
    """Schedule a step with this block table, and compute nothing."""
    name = one.request_id
    given = {name: snapshots} if snapshots else {}
    scheduled = PlainStep(tokens={name: tokens}, tables={name: ids}, snapshots=given)
    engine.orders += engine.half.orders(scheduled).stores


def finish(engine, one):
    engine.finish(one)
    engine.orders += engine.stores.take()


def load(engine, one, tokens):
    """Fill the blocks of these tokens as a load does; the engine counts them as computed."""
    engine.cover(one, tokens)
    engine.compute(one, 0, tokens)
    one.num_computed_tokens = tokens


def ranks_store(engine, order=None, failure=None):
    """Let the ranks carry out an order, by default the first. Check that it copies the right blocks."""
    order = order or engine.orders[0]
    engine.orders.remove(order)
    wanted = {}
    for piece in order.pieces:
        ends, key, tokens = held(engine, order, piece)
        assert engine.cache.reserved[piece.offset] == key
        wanted[piece.offset] = tokens
        engine.stored.add((piece.group, ends))
    engine.half.take_reports(StepReports(reports={order.key: Report(failure)}))
    assert {offset: engine.cache.tokens[offset] for offset in wanted} == wanted


def held(engine, order, piece):
    """What the blocks of a chunk hold: the tokens it ends with, its key, and the number of its tokens."""
    of = engine.canonical.groups[piece.group]
    found, tokens = set(), 0
    for stretch, group in zip(order.tables, engine.groups, strict=True):
        if group.label != of.label:
            assert stretch is None
            continue
        table = stretch.table().tolist()
        if of.kind is GroupKind.STATE:
            assert (stretch.first, len(table)) == (0, 1)
            found.add(engine.content[table[0]][0])
            continue
        begin, last = piece.number * CHUNK, min((piece.number + 1) * CHUNK, order.available.stop)
        first, tokens = max(begin, order.available.start), last - begin
        alignment_tokens = length.content_alignment(of, CHUNK)
        needed = first_attended(of, last - 1)
        assert first == begin or first <= needed // alignment_tokens * alignment_tokens
        content = [
            engine.content[table[at // group.block_tokens]][at % group.block_tokens]
            for at in range(first, last)
        ]
        assert content == [content[-1][: at + 1] for at in range(first, last)]
        found.add(content[-1])
    (ends,) = found
    chunks = Prompts(engine.canonical, Adapters()).add(request("other", ends))
    whole = len(ends) == (piece.number + 1) * CHUNK
    key = chunks.key(piece.group, piece.number) if whole else chunks.tail(piece.group, len(ends))
    return ends, key, tokens


def all_stored(engine):
    while engine.orders:
        ranks_store(engine)


def numbers(engine):
    """(group, chunk) of what is ordered, and not carried out."""
    return [(piece.group, piece.number) for order in engine.orders for piece in order.pieces]


def pinned(engine):
    """Number of blocks that stores pin."""
    tables = [block for tables in engine.tables.values() for table in tables for block in table]
    return engine.pool.references - sum(not block.is_null for block in tables)


def end_all(engine):
    """End everything: no block is pinned any more."""
    for tables in engine.tables.values():
        for table in tables:
            engine.drop(table, len(table))
    all_stored(engine)
    assert engine.pool.references == 0
    assert not engine.stores.busy
    engine.host.check_integrity()


def test_a_prompt_computed_in_steps_is_stored_chunk_by_chunk_and_its_tail_with_the_last():
    engine = storing()
    one = arrived(engine, range(20))
    ordered = []
    for tokens in (5, 5, 9, 1):
        step(engine, (one, tokens))
        ordered.append(numbers(engine))
        all_stored(engine)
    assert ordered == [[], [(0, 0)], [(0, 1)], [(0, 2)]]
    assert engine.stored == {(0, tuple(range(n))) for n in (8, 16, 20)}
    end_all(engine)


def ranked(engine):
    """Keys in host memory, what would leave first first."""
    return [engine.policy.evict() for _ in range(len(engine.host))]


@pytest.mark.parametrize("in_time", [True, False])
def test_the_first_chunks_of_an_ended_request_are_evicted_last(in_time):
    engine = storing(WINDOWED, blocks=600)
    one = arrived(engine, range(36), 30)
    chunks = engine.prompts.get(one)
    cold = [chunks.key(1, 0)]  # no window reaches that far back
    keys = [key for key in chunks.all_keys(30) if key not in cold]
    for tokens in (16, 14, 6):
        step(engine, (one, tokens))
        if in_time:
            all_stored(engine)
    finish(engine, one)
    while engine.orders:  # in whichever order ranks have done
        ranks_store(engine, engine.orders[-1])
    kept = [key for key in keys if engine.host.contains([key])[0]]
    assert len(kept) == 9
    assert ranked(engine) == cold + kept[::-1]


def cold_windows(engine):
    """Chunks of the windowed group that are evicted before all others, of the prompt range(200)."""
    chunks = engine.prompts.chunks_of(request("other", range(200)))
    return [n for n in range(25) if chunks.key(1, n) in engine.policy._cold]


def served(engine, tokens, prompt, steps, name="a", found=0, shared=0):
    """A request that finds so many tokens, of a prompt of whose full-attention chunks so many are cached."""
    one = arrived(engine, range(tokens), prompt, name)
    engine.prompts.get(one).shared_tokens = shared
    one.num_computed_tokens = found
    for number in steps:
        step(engine, (one, number))
        all_stored(engine)
    yield
    finish(engine, one)
    all_stored(engine)
    yield


def test_windows_are_cold_that_neither_the_end_nor_what_was_found_nor_a_shared_prefix_needs():
    engine = storing(WINDOWED, blocks=600)
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
    engine = storing(WINDOWED, blocks=600)
    request = served(engine, 80, 20, (20, *(1,) * 60))
    next(request)
    assert cold_windows(engine) == [], "the answer may end at every chunk"
    next(request)
    # Token 15 sees from 4 on, token 19 from 8 on: chunks 0 to 2. Token 79 sees from 68 on, chunk 8.
    assert cold_windows(engine) == [3, 4, 5, 6, 7]


def test_chunks_of_a_found_prefix_count_as_used():
    engine = storing()
    for name in "ab":
        one = arrived(engine, range(*{"a": (16,), "b": (50, 66)}[name]), name=name)
        step(engine, (one, 16))
        all_stored(engine)
        finish(engine, one)
    again = arrived(engine, range(16), name="again")
    keys = engine.prompts.get(again).all_keys(16)
    load(engine, again, 15)
    step(engine, (again, 1))
    finish(engine, again)
    assert not engine.orders
    assert ranked(engine)[2:] == keys[::-1]


def test_a_reset_forgets_ended_requests():
    engine = storing()
    one = arrived(engine, range(16))
    step(engine, (one, 16))
    finish(engine, one)
    engine.prompts.start_anew()
    engine.storing.start_anew()
    all_stored(engine)
    assert not engine.cache.used
    end_all(engine)


def test_a_chunk_that_decoding_completes_is_stored_when_its_tokens_are_known():
    engine = storing()
    one = arrived(engine, range(30), 6, known=6)
    step(engine, (one, 6))
    assert numbers(engine) == [(0, 0)]  # the tail
    all_stored(engine)
    for computed in range(6, 12):
        grow(one, computed)  # the token that is computed was sampled in the step before, which is under way
        step(engine, (one, 1))
        assert numbers(engine) == ([(0, 0)] if computed == 8 else [])
        all_stored(engine)
    end_all(engine)


def test_tokens_that_are_refused_are_not_stored():
    engine = storing()
    one = arrived(engine, range(30), 4, known=5)
    step(engine, (one, 4))
    all_stored(engine)
    step(engine, (one, 4, 3))  # one token and three drafts: as if tokens 4 to 7 were computed
    assert numbers(engine) == []
    grow(one, 6)
    step(engine, (one, 3))
    grow(one, 9)
    finish(engine, one)
    all_stored(engine)
    assert engine.stored == {(0, tuple(range(4))), (0, tuple(range(8)))}
    end_all(engine)


def test_a_request_that_ends_with_a_refused_draft_does_not_store_it():
    engine = storing()
    one = arrived(engine, range(30), 4, known=5)
    step(engine, (one, 4))
    all_stored(engine)
    step(engine, (one, 4, 1))
    grow(one, 8)  # the token in place of the draft has been sampled, not computed
    finish(engine, one)
    assert numbers(engine) == []
    end_all(engine)


def test_a_chunk_in_host_memory_is_not_stored_again():
    engine = storing()
    step(engine, (arrived(engine, range(16)), 16))
    all_stored(engine)
    step(engine, (arrived(engine, [*range(16), *range(8)], name="b"), 24))
    assert numbers(engine) == [(0, 2)]
    end_all(engine)


def keys_of(shape, tokens):
    """Keys of a prompt's chunks, without snapshots."""
    chunks = Prompts(shape[1], Adapters()).add(request("other", tokens))
    return chunks.all_keys(len(tokens))


def test_a_found_chunk_that_a_slow_tier_has_is_not_stored_again():
    engine = storing(slow=keys_of(PLAIN, range(24))[1:2])
    one = arrived(engine, range(24))
    load(engine, one, 23)
    step(engine, (one, 1))
    assert numbers(engine) == [(0, 0), (0, 2)]
    end_all(engine)


def test_a_computed_chunk_comes_to_host_memory_even_if_a_slow_tier_has_it():
    engine = storing(slow=keys_of(PLAIN, range(20)))
    one = arrived(engine, range(20))
    load(engine, one, 12)
    step(engine, (one, 8))
    assert numbers(engine) == [(0, 1), (0, 2)]
    all_stored(engine)
    step(engine, (arrived(engine, range(16), name="b"), 16))
    assert numbers(engine) == [(0, 0)]
    end_all(engine)


def test_a_snapshot_comes_to_host_memory_even_if_a_slow_tier_has_it():
    engine = storing(HYBRID, slow=keys_of(HYBRID, range(20)))
    for name in "ab":
        one = arrived(engine, range(20), name=name)
        step(engine, (one, 8), snapshots=[(one, 8)])
        assert ((STATE_GROUP, 0) in numbers(engine)) == (name == "a")
        all_stored(engine)
    end_all(engine)


def test_a_chunk_is_not_stored_twice_at_once():
    engine = storing()
    step(engine, (arrived(engine, range(16)), 16), (arrived(engine, range(16), name="b"), 16))
    assert numbers(engine) == [(0, 0), (0, 1)]
    assert engine.stores.chunks == 2
    end_all(engine)
    assert engine.stores.chunks == 0


def windows(engine):
    """Chunks of the window that are ordered."""
    return [number for group, number in numbers(engine) if engine.canonical.groups[group].attention_span]


def test_blocks_that_a_window_has_not_let_go_yet_are_stored():
    engine = storing(WINDOWED, blocks=600)
    one = arrived(engine, range(40))
    for tokens in (20, 16, 4):
        step(engine, (one, tokens))
    assert windows(engine) == [0, 1, 2, 3, 4]
    end_all(engine)


def test_a_chunk_is_stored_without_tokens_that_no_window_reaches():
    short = LayerCache(GroupKind.SLIDING, 4, attention().fields)
    engine = storing(geometry(attention(), short))
    one = arrived(engine, range(24))
    step(engine, (one, 7))
    step(engine, (one, 9))  # token 7 sees from token 4 on: the first block has gone
    assert windows(engine) == [0, 1]
    for _ in range(8):  # decoding: half of every chunk has gone before its end comes
        all_stored(engine)
        step(engine, (one, 1))
    assert windows(engine) == [2]
    assert [order.available for order in engine.orders] == [range(16, 24), range(20, 24)]
    end_all(engine)


@pytest.mark.parametrize(("alignment_tokens", "kept"), [(4, [0, 1]), (8, [1])])
def test_a_stored_chunk_begins_at_the_window_alignment(monkeypatch, alignment_tokens, kept):
    monkeypatch.setattr(length, "WINDOW_ALIGNMENT_TOKENS", alignment_tokens)
    engine = storing(geometry(attention(), LayerCache(GroupKind.SLIDING, 4, attention().fields)))
    one = arrived(engine, range(24))
    step(engine, (one, 7))
    step(engine, (one, 9))  # only [4, 8) of the first chunk is there
    assert windows(engine) == kept
    end_all(engine)


def test_blocks_that_a_load_filled_in_part_are_not_stored():
    engine = storing(WINDOWED, blocks=600)
    one = arrived(engine, range(40))
    assert engine.cover(one, 25)
    engine.parts.begin(one, engine.table_ids(one), LoadSpan(0, 25, 40), (1, 1))  # 25 sees tokens from 14 on
    step(engine, (one, 25))
    assert windows(engine) == [0, 2]
    end_all(engine)


def test_a_chunk_that_lacks_what_its_end_needs_is_not_stored():
    engine = storing(geometry(attention(), LayerCache(GroupKind.SLIDING, 8, attention().fields)))
    one = arrived(engine, range(16))
    step(engine, (one, 7))
    engine.drop(engine.tables["a"][1], 1)
    step(engine, (one, 9))
    assert windows(engine) == [1]
    end_all(engine)


@pytest.mark.parametrize(("ids", "there"), [([5, 6], True), ([5], False), ([5, 0], False), ([0, 6], False)])
def test_a_chunk_that_straddles_blocks_needs_all_of_them(ids, there):
    ranks = lay_out(model(attention()), EngineShape(1, (1,), 12, "LBHNC", 9))
    engine = storing((ranks[0].groups, canonical_form_of(ranks, CHUNK)))
    engine.pool.allocate(8)
    schedule(engine, arrived(engine, range(16)), 16, (ids,))
    assert ((0, 1) in numbers(engine)) == there


@pytest.mark.parametrize(
    ("found", "kept"),
    [(0, [0, 1, 2, 3, 4]), (16, [1, 2, 3, 4]), (20, [2, 3, 4]), (24, [2, 3, 4]), (32, [3, 4])],
)
def test_chunks_before_the_window_of_a_found_prefix_are_not_stored(found, kept):
    stores = [LayerCache(GroupKind.SLIDING, CHUNK, attention().fields)]
    engine = storing(geometry(*stores))
    one = arrived(engine, range(40))
    one.num_computed_tokens = found
    engine.cover(one, 40)
    schedule(engine, one, 40 - found, engine.table_ids(one))
    assert [number for _, number in numbers(engine)] == kept


def test_a_preempted_request_forgets_the_prefix_that_it_found():
    engine = storing(WINDOWED, blocks=600)
    for _ in served(engine, 160, 160, (100, 60)):
        pass
    cold = cold_windows(engine)
    assert 6 in cold
    one = arrived(engine, range(160), name="b")
    one.num_computed_tokens = 56  # a later prompt that ends here would need chunk 6
    schedule(engine, one, 1, ([0] * 40, [0] * 40))
    engine.preempt(one)
    step(engine, (one, 160))
    all_stored(engine)
    finish(engine, one)
    assert cold_windows(engine) == cold


def test_a_local_prefix_is_stored_if_no_tier_has_it():
    engine = storing()
    one = arrived(engine, range(24))
    load(engine, one, 16)
    step(engine, (one, 8))
    assert numbers(engine) == [(0, 0), (0, 1), (0, 2)]
    end_all(engine)


def test_the_last_chunk_is_stored_from_blocks_that_the_ended_request_freed():
    engine = storing()
    one = arrived(engine, range(9), 3, known=3)
    step(engine, (one, 3))
    all_stored(engine)
    for _ in range(5):
        step(engine, (one, 1))
    grow(one, 9)
    finish(engine, one)
    assert numbers(engine) == [(0, 0)]
    assert engine.pool.references == 2, "pinned"
    end_all(engine)


def test_a_load_that_did_not_finish_is_not_stored():
    engine = storing()
    one = arrived(engine, range(40))
    engine.cover(one, 32)
    one.num_computed_tokens = 32  # as the engine counts it while it is being loaded
    finish(engine, one)
    assert numbers(engine) == []
    end_all(engine)


def test_a_load_that_did_not_finish_after_a_preemption_is_not_stored():
    engine = storing()
    one = arrived(engine, range(40))
    step(engine, (one, 10))
    all_stored(engine)
    engine.preempt(one)
    engine.cover(one, 32)
    one.num_computed_tokens = 32
    finish(engine, one)
    assert numbers(engine) == []
    end_all(engine)


def test_a_request_that_was_preempted_stores_from_where_it_was():
    engine = storing()
    one = arrived(engine, range(24))
    step(engine, (one, 9))
    engine.preempt(one)
    step(engine, (one, 20))
    assert numbers(engine) == [(0, 0), (0, 1)]
    all_stored(engine)
    step(engine, (one, 4))
    assert numbers(engine) == [(0, 2)]
    end_all(engine)


def test_a_store_that_fails_is_forgotten_and_its_blocks_given_back():
    engine = storing()
    step(engine, (arrived(engine, range(16)), 16))
    ranks_store(engine, failure="a block is gone")
    assert (len(engine.host), engine.host.used_bytes) == (0, 0)
    assert engine.cache.counts.failed == 2
    end_all(engine)


def test_stores_hold_back_no_more_than_their_share_of_the_blocks():
    engine = storing(blocks=64)
    most = int(MOST_PINNED * 64)
    one = arrived(engine, range(200))
    step(engine, (one, most * BLOCK))
    assert pinned(engine) == most
    step(engine, (one, CHUNK))
    assert engine.stores.dropped == {"too many stores under way": 1}
    all_stored(engine)
    step(engine, (one, CHUNK))
    assert numbers(engine) == [(0, most * BLOCK // CHUNK + 1)]
    end_all(engine)


def test_a_pool_that_can_pin_one_chunk_at_a_time_stores_one():
    engine = storing(blocks=11)
    assert engine.stores.most_pinned == CHUNK // BLOCK
    one = arrived(engine, range(24))
    step(engine, (one, 2 * CHUNK))
    assert numbers(engine) == [(0, 0)]
    assert engine.stores.dropped == {"too many stores under way": 1}
    end_all(engine)


def test_a_chunk_without_room_in_host_memory_pins_no_block():
    engine = storing(pages=1)
    one = arrived(engine, range(24))
    step(engine, (one, 8))
    assert numbers(engine) == [(0, 0)]
    step(engine, (one, 16))
    assert numbers(engine) == [(0, 0)]
    assert pinned(engine) == 2
    end_all(engine)


def test_requests_without_names_are_not_stored():
    engine = storing()
    one = request("a", range(16), mm_features=[], prompt_embeds=object())
    one.truth = list(range(16))
    engine.arrive(one)
    step(engine, (one, 16))
    finish(engine, one)
    assert not engine.orders
    end_all(engine)


def test_after_a_reset_nothing_of_running_requests_is_stored():
    engine = storing()
    one = arrived(engine, range(24))
    step(engine, (one, 8))
    engine.prompts.start_anew()
    engine.storing.start_anew()
    engine.cache.clear()
    step(engine, (one, 8))
    assert len(engine.orders) == 1
    all_stored(engine)
    assert len(engine.host) == 0
    end_all(engine)


STATE_GROUP = next(n for n, group in enumerate(HYBRID[1].groups) if group.kind is GroupKind.STATE)


def test_snapshots_at_the_ends_of_chunks_are_stored_and_there_are_no_tails():
    engine = storing(HYBRID)
    one = arrived(engine, range(20))
    step(engine, (one, 8), snapshots=[(one, 8)])
    step(engine, (one, 4), snapshots=[(one, 12)])
    step(engine, (one, 8), snapshots=[(one, 16)])
    all_stored(engine)
    assert {(group, len(ends)) for group, ends in engine.stored} == {
        (group, tokens) for group in range(3) for tokens in (8, 16)
    }
    end_all(engine)


def test_a_request_uses_its_own_snapshots_and_the_one_that_it_continued_from():
    engine = storing(HYBRID)
    chunks = Prompts(engine.canonical, Adapters()).add(request("other", range(28)))
    for name, found, end in (("a", 0, 20), ("b", 16, 28)):
        one = arrived(engine, range(end), name=name)
        if found:
            load(engine, one, found)
        for at in range(found + CHUNK, end, CHUNK):
            step(engine, (one, CHUNK), snapshots=[(one, at)])
            all_stored(engine)
        finish(engine, one)
    used = [[key for key in keys if key[-1] == STATE_GROUP] for keys in engine.cache.used]
    assert used == [[chunks.key(STATE_GROUP, n) for n in numbers] for numbers in ((0, 1), (1, 2))]
    end_all(engine)


def test_a_snapshot_of_some_layers_only_is_not_stored():
    groups, canonical = HYBRID
    engine = storing(((*groups, groups[2]), canonical))
    one = arrived(engine, range(8))
    engine.cover(one, 8)
    first, second = (block.block_id for block in engine.pool.allocate(2))
    for snapshots, stored in (([(2, first, 8)], False), ([(2, first, 8), (3, second, 8)], True)):
        schedule(engine, one, 8, engine.table_ids(one), snapshots)
        assert (STATE_GROUP in [group for group, _ in numbers(engine)]) == stored


def test_snapshots_of_a_request_whose_tokens_are_not_known_yet_are_not_stored():
    engine = storing(HYBRID)
    one = arrived(engine, range(20), 6, known=7)
    step(engine, (one, 6), snapshots=[(one, 8)])
    assert STATE_GROUP not in [group for group, _ in numbers(engine)]
    end_all(engine)


def test_with_fewer_snapshots_those_at_multiples_and_the_prompts_last_are_kept():
    engine = storing(HYBRID, every=2 * CHUNK)
    one = arrived(engine, range(60), 44)
    for end in range(CHUNK, 57, CHUNK):
        step(engine, (one, CHUNK), snapshots=[(one, end)])
        all_stored(engine)
    assert {len(ends) for group, ends in engine.stored if group == STATE_GROUP} == {16, 32, 40, 48}
    end_all(engine)


@pytest.mark.parametrize("shape", [WINDOWED, CHUNKED, HYBRID])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("prompt", [40, 44, 64])
def test_all_chunks_are_kept_that_a_prefix_of_a_likely_length_needs(shape, every, prompt):
    engine = storing(shape, blocks=600, every=every * CHUNK)
    tokens = list(range(90))
    one = arrived(engine, tokens, prompt)
    for end in range(CHUNK, 81, CHUNK):
        step(engine, (one, CHUNK), snapshots=[(one, end)] if shape is HYBRID else ())
        all_stored(engine)

    def found(length):
        chunks = Prompts(engine.canonical, Adapters()).add(request("b", [*tokens[:length], 999]))
        return chunks.look_up(length + 1, 0, engine.cache.tier_numbers).tokens

    for end in {*range(every * CHUNK, 81, every * CHUNK), prompt // CHUNK * CHUNK}:
        assert found(end) == end, "others go on from there"
    whole = Prompts(engine.canonical, Adapters()).add(request("b", tokens[:prompt]))
    farthest = (prompt - 1) // CHUNK * CHUNK if shape is HYBRID else prompt
    again = whole.look_up(prompt, 0, engine.cache.tier_numbers)
    assert again.tokens == farthest, "and the same prompt from where it can"
    end_all(engine)


def test_windows_between_the_places_where_a_prefix_may_end_are_not_kept():
    engine = storing(WINDOWED, blocks=600, every=8 * CHUNK)
    one = arrived(engine, range(160))
    step(engine, (one, 160))
    assert windows(engine) == [6, 7, 14, 15, 18, 19]
    assert len(numbers(engine)) == 20 + 6, "of full attention all"
    end_all(engine)


WORDS = [[n * 100 + at for at in range(60)] for n in range(2)]


class Serving(RuleBasedStateMachine):
    """Requests of few texts in an engine with few blocks, whose ranks are late; every store is checked."""

    @initialize(blocks=st.integers(30, 90), pages=st.integers(4, 20), every=st.integers(1, 3))
    def make(self, blocks, pages, every):
        self.engine = storing(WINDOWED, blocks, pages, every * CHUNK)
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
        if not step(self.engine, (one, tokens, refused)):
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
        finish(self.engine, one)

    @precondition(lambda self: any(not one.num_computed_tokens for one in self.running))
    @rule(data=st.data(), tokens=st.integers(1, 40))
    def load(self, data, tokens):
        """Blocks for what is being loaded; the engine counts it as computed."""
        one = self.pick(data, [one for one in self.running if not one.num_computed_tokens])
        tokens = min(tokens, one.num_tokens)
        if self.engine.cover(one, tokens):
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
            finish(self.engine, one)
            return
        self.running.append(one)
        if how == "failed":
            self.engine.preempt(one)
        else:
            self.engine.compute(one, 0, one.num_computed_tokens)

    @precondition(lambda self: self.engine.orders)
    @rule(data=st.data(), well=st.booleans())
    def ranks_store(self, data, well):
        ranks_store(self.engine, self.pick(data, self.engine.orders), None if well else "no")

    @rule()
    def forget_host_memory(self):
        self.engine.cache.clear()

    @invariant()
    def pins_are_those_of_orders(self):
        if hasattr(self, "engine"):
            engine = self.engine
            ordered = [
                {block for part in order.tables if part for block in part.ids} - {0}
                for order in engine.orders
            ]
            assert pinned(engine) == sum(map(len, ordered)) <= MOST_PINNED * len(engine.pool.blocks)
            engine.host.check_integrity()

    def teardown(self):
        if hasattr(self, "engine"):
            end_all(self.engine)


TestServing = Serving.TestCase
TestServing.settings = examples(60, stateful_step_count=40)


def test_a_preempted_request_that_ends_during_a_load_stores_no_chunk():
    engine = storing()
    one = arrived(engine, range(24), known=9)
    step(engine, (one, 16))  # the second chunk is computed, its tokens are not known yet
    all_stored(engine)
    engine.preempt(one)
    grow(one, 24)
    assert engine.cover(one, 16)
    one.num_computed_tokens = 16  # what a load is to bring into these blocks
    finish(engine, one)
    assert numbers(engine) == []
    end_all(engine)


def test_events_follow_a_store_from_its_beginning_to_its_end():
    engine = storing()
    one = arrived(engine, range(20))
    step(engine, (one, 20))
    began = events_of(engine, StoreBegan)
    assert [(event.request_id, event.group) for event in began] == [("a", "0 full_attention")] * len(began)
    assert sum(event.chunks for event in began) == 3
    assert engine.told == began
    all_stored(engine)
    ended = engine.told[len(began) :]
    assert {event.began for event in ended} == set(began)
    assert {(type(event), event.request_id, event.failure) for event in ended} == {(StoreEnded, "a", "")}


@examples(30)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 3), min_size=3, max_size=3),  # tokens of each request
            st.lists(st.sampled_from([1, 2, 20]), min_size=3, max_size=3),
            st.sampled_from([[1, 1, 1]] * 4 + [[0, 1, 1], [1, 0, 1]]),
            st.sampled_from(["preempt", "finish", "reset"]),
        ),
        max_size=60,
    )
)
def test_a_look_at_every_request_stores_no_other_chunks(work):
    looking, counting = storing(blocks=400), storing(blocks=400)
    looking.half.looks = True
    ordered = {engine: [] for engine in (looking, counting)}
    for engine, found in ordered.items():
        names = itertools.count()
        running = [arrived(engine, range(at, at + 200), 6, f"r{next(names)}") for at in (0, 300, 600)]
        for one in work:
            if one == "preempt":
                engine.preempt(running[0])
                step(engine, (running[1], 1))
            elif one == "finish":
                finish(engine, running[0])
                at = 1000 * (1 + next(names))
                running = [*running[1:], arrived(engine, range(at, at + 200), 6, f"r{at}")]
            elif one == "reset":
                engine.storing.start_anew()
            else:
                step(engine, *((r, tokens) for r, tokens in zip(running, one, strict=True) if tokens))
            found.append(numbers(engine))
            all_stored(engine)
    assert ordered[looking] == ordered[counting]


class WatchedRequest(MadeUpRequest):
    """Remembers how many tokens were computed whenever its preemptions are read."""

    def __getattr__(self, name):
        if name == "num_preemptions":
            self.raw.looks.append(self.raw.num_computed_tokens)
        return super().__getattr__(name)


def test_a_step_in_which_no_chunk_ends_does_not_look_at_each_request():
    engine, tokens = storing(), list(range(200))
    known = vars(request("a", tokens, 8).raw)
    one = engine.arrive(WatchedRequest(**known, truth=tokens, looks=[]))
    step(engine, (one, 8))
    all_stored(engine)
    one.looks.clear()
    for _ in range(8):
        step(engine, (one, 1))
    assert set(one.looks) == {15}


def test_a_new_request_with_the_id_of_an_ended_one_is_looked_at():
    engine = storing()
    one = arrived(engine, range(200), 9)
    for tokens in (9, 1):
        step(engine, (one, tokens))
    finish(engine, one)
    all_stored(engine)
    other = arrived(engine, range(300, 500), 8)
    load(engine, other, 7)
    step(engine, (other, 1))
    assert numbers(engine) == [(0, 0)]
