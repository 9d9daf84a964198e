"""The tiers as a source: loads in parts, one end for each, and slots that are closed once."""

from __future__ import annotations

import pytest

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.tier_queue import STUCK_SECONDS
from kvferry.connector.bids import PlaceTokens, Speeds
from kvferry.connector.content import Prompts
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import EventStream, GroupBytes, MissReason, SourceMiss
from kvferry.connector.messages import StepReports
from kvferry.connector.tiers.source import TierSource
from kvferry.geometry import Group, GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.geometry.canonical.derive import WINDOW_ALIGNMENT_TOKENS
from kvferry.keys.tenant import tenant_of
from kvferry.planning.select import LoadSpan
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.names import TIERS, GetOutcome
from kvferry.tiers.storage_tier import StoreUsage
from kvferry.tiers.tenants import Tenant, Tenants
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.read_plan import LoadFigures, Report
from support.block_pool import request
from support.fake_engine import FakeEngine, PartialHalf
from support.loads import made_up_load
from support.lora import adapter, slow_files
from support.models import attention, model
from support.slow_tiers import answer, fake_tiers, jobs_of, queue_by_hand, table_of

CHUNK, PROMPT = 8, 28
RANKS = lay_out(model(attention()), EngineShape(1, (1,), 4, "LBHNC", 99))
CANONICAL = canonical_form_of(RANKS, CHUNK)
(SIZE,) = (group.chunk_bytes for group in CANONICAL.groups)
GROUPS = (CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=4),)
LATE = Report("its deadline passed", late=True)


def with_tiers(*kept, chunks=99, **options) -> FakeEngine:
    """An engine with a request of 28 tokens, three chunks and a tail, and tiers that have these chunks."""
    engine = FakeEngine(GROUPS)
    prompts = engine.prompts = Prompts(CANONICAL, engine.adapters)
    engine.one = request("a", range(PROMPT))
    named = Prompts(CANONICAL, engine.adapters).add(engine.one)
    engine.keys = [named.key(0, number) for number in range(3)] + [named.tail(0, PROMPT)]
    tiers = fake_tiers(*([(engine.keys[number], bytes(SIZE)) for number in numbers] for numbers in kept))
    engine.queues = [queue_by_hand(tier, engine.clock) for tier in tiers]
    engine.host = HostTier(chunks * SIZE, [SIZE], EVICTION_POLICIES["lru"], table_of(tiers))
    engine.cache = ChunkCache(
        engine.host,
        lambda _, size: memoryview(bytearray(size)),
        CANONICAL.groups,
        engine.queues,
    )
    engine.source = TierSource(
        engine.cache,
        prompts,
        RANKS[0].groups,
        CANONICAL,
        EventStream(),
        **{"workers": 1, "most_loads": 32, **options},
    )
    engine.half = PartialHalf(source=engine.source)
    engine.arrive(engine.one)
    return engine


def store(engine, *numbers):
    for number in numbers:
        tokens = CHUNK if number < 3 else PROMPT - 3 * CHUNK
        engine.cache.filled(engine.cache.reserve(engine.keys[number], 0), tokens, None)


def bid(engine, local_tokens=0):
    return engine.bid(engine.one, local_tokens)


def begin(engine, local_tokens=0):
    return engine.begin_load(engine.one, local_tokens)


def begin_with(engine, load):
    engine.feeds[load.key] = feed = engine.source.begin(load, engine.one)
    engine.half.feeds.append(feed)


def step(engine):
    """Parts of loads that the ranks are told of in the next step."""
    engine.cache.poll()
    return engine.step().parts


def read(engine, number, outcome, tier=0):
    """Let a tier's read of a chunk end."""
    answer(engine.queues[tier], "read", engine.keys[number], outcome)


def moved(engine, order):
    figures = LoadFigures(bytes_by_group=(SIZE * len(order.pieces),), transfer_seconds=0.5)
    engine.source.take_reports(StepReports(reports={order.key: Report(None, figures=figures)}))


def holds(engine):
    """Slots of host memory that are held, but for those that are being written to a tier."""
    engine.host.check_integrity()
    return engine.host.holds - sum(queue.writes.count for queue in engine.queues)


def ends(parts):
    """Each load that has ended here, and why it has failed."""
    return [(part.load, part.failure) for part in parts if part.last or part.failure is not None]


def copies(parts):
    return [part.work for part in parts if part.work is not None]


def numbers(parts):
    return [[piece.number for piece in order.pieces] for order in copies(parts)]


def test_the_longest_prefix_is_offered_beyond_what_is_here():
    engine = with_tiers()
    assert bid(engine) is None
    store(engine, 0, 1, 3)
    assert bid(engine).tokens == 16
    assert bid(engine, local_tokens=12).tokens == 4
    assert bid(engine, local_tokens=16) is None
    store(engine, 2)
    assert bid(engine).tokens == PROMPT


def test_a_load_from_host_memory_is_one_part_and_an_end_and_closes_its_slots_when_all_ranks_have_it():
    engine = with_tiers()
    store(engine, 0, 1, 2, 3)
    load = begin(engine, local_tokens=8)
    assert (engine.feeds[load.key].origin, engine.source.busy) == ("host", True)
    told = step(engine)
    assert (numbers(told), ends(told)) == ([[1, 2, 3]], [("a#1", None)])
    (order,) = copies(told)
    assert (told[0].load, order.first) == (load.key, True)
    assert not step(engine), "all is said once"
    assert holds(engine) == 3
    moved(engine, order)
    assert holds(engine) == 0
    assert engine.feeds[load.key].moved(Report(None)) == (GroupBytes("0 full_attention", "copied", 3 * SIZE),)
    assert engine.cache.copy_seconds == [0.5]
    engine.end_load(load, Report(None))
    assert not engine.source.busy


def test_chunks_go_to_the_ranks_as_they_come():
    engine = with_tiers([0, 1])
    begin(engine)
    assert numbers(step(engine)) == []
    read(engine, 1, GetOutcome.HIT)
    first = step(engine)
    assert (numbers(first), ends(first)) == ([[1]], [])
    read(engine, 0, GetOutcome.HIT)
    second = step(engine)
    assert (numbers(second), ends(second)) == ([[0]], [("a#1", None)])
    orders = copies(first + second)
    assert [order.first for order in orders] == [True, False]
    for order in orders:
        moved(engine, order)
    assert holds(engine) == 0


def test_a_load_without_one_of_its_chunks_fails_and_a_shorter_prefix_is_offered():
    engine = with_tiers([0, 1, 2])
    load = begin(engine)
    read(engine, 0, GetOutcome.HIT)
    read(engine, 2, GetOutcome.ABSENT)
    told = step(engine)
    assert numbers(told) == [[0]]
    assert ends(told) == [("a#1", "a chunk of the file tier: absent")]
    engine.end_load(load, Report("a chunk of the file tier: absent"))
    assert ends(step(engine)) == []
    assert bid(engine).tokens == 16, "the tier is not to blame"
    read(engine, 1, GetOutcome.HIT)
    moved(engine, copies(told)[0])
    step(engine)
    assert holds(engine) == 0


def test_a_tier_with_a_read_error_is_excluded_for_the_request():
    engine = with_tiers([0, 1], [0])
    load = begin(engine)
    read(engine, 1, GetOutcome.IO_ERROR)
    told = step(engine)
    assert ends(told) == [("a#1", "a chunk of the file tier: I/O error")]
    engine.end_load(load, Report("I/O error"))
    read(engine, 0, GetOutcome.ABSENT)
    step(engine)
    read(engine, 0, GetOutcome.HIT, tier=1)
    step(engine)
    for tier, number in ((engine.queues[0].tier, 1), (engine.queues[1].tier, 1)):
        tier.kept[engine.keys[number]] = bytes(SIZE)
    engine.queues[0].tier.keys.add(engine.keys[1])
    assert bid(engine).tokens == 8
    engine.queues[1].tier.keys.add(engine.keys[1])
    assert bid(engine).tokens == 16
    second = begin(engine)
    assert engine.feeds[second.key].origin == "object"


def test_a_load_past_its_deadline_excludes_the_tier_it_waits_for():
    engine = with_tiers([0, 1])
    store(engine, 0)
    load = begin(engine)
    (order,) = copies(step(engine))
    engine.end_load(load, LATE)
    assert step(engine) == [], "all ranks have reported it"
    assert bid(engine).tokens == 8
    read(engine, 1, GetOutcome.HIT)
    assert not step(engine), "it comes, and nobody is given it"
    assert bid(engine).tokens == 16, "it is in host memory now"
    moved(engine, order)
    assert holds(engine) == 0


def test_a_load_late_because_of_slow_ranks_excludes_no_tier():
    engine = with_tiers([0, 1])
    load = begin(engine)
    read(engine, 0, GetOutcome.HIT)
    read(engine, 1, GetOutcome.HIT)
    (order,) = copies(step(engine))
    engine.end_load(load, LATE)
    engine.cache.clear()
    assert bid(engine).tokens == 16
    assert ends(step(engine)) == []
    moved(engine, order)
    assert holds(engine) == 0


def test_a_dropped_load_closes_the_slots_that_ranks_do_not_copy():
    engine = with_tiers([1])
    store(engine, 0)
    load = begin(engine)
    assert holds(engine) == 2
    engine.feeds[load.key].drop()
    engine.source.finished("a")
    told = step(engine)
    assert numbers(told) == []
    assert ends(told) == [("a#1", "nobody waits for it any more")]
    engine.feeds[load.key].drop()
    assert ends(step(engine)) == []
    read(engine, 1, GetOutcome.HIT)
    step(engine)
    assert holds(engine) == 0
    assert not engine.source.busy


def test_a_dropped_load_keeps_the_slots_that_ranks_copy():
    engine = with_tiers([1])
    store(engine, 0)
    load = begin(engine)
    (order,) = copies(step(engine))
    engine.feeds[load.key].drop()
    assert ends(step(engine)) == [("a#1", "nobody waits for it any more")]
    assert holds(engine) == 2, "a part, and a read"
    read(engine, 1, GetOutcome.HIT)
    step(engine)
    moved(engine, order)
    assert holds(engine) == 0


def test_a_reset_ends_loads_and_nothing_kept_before_is_offered():
    engine = with_tiers()
    store(engine, 0, 1)
    begin(engine)
    engine.prompts.start_anew()
    engine.source.start_anew()
    engine.cache.clear()
    told = step(engine)
    assert (numbers(told), ends(told)) == ([], [("a#1", "the cache was reset")])
    assert bid(engine) is None
    assert holds(engine) == 0


def test_a_load_fails_if_its_request_has_no_chunk_keys_any_more():
    engine = with_tiers()
    store(engine, 0)
    bid(engine)
    engine.prompts.remove("a")
    load = made_up_load("a#1", LoadSpan(0, 8, PROMPT), [[1, 2]])
    begin_with(engine, load)
    assert ends(step(engine)) == [("a#1", "its chunks have no names any more")]


def test_a_stuck_tier_is_not_offered():
    engine = with_tiers([0, 1])
    begin(engine)
    engine.clock.now += STUCK_SECONDS + 1
    assert bid(engine) is None


def test_only_so_many_loads_are_under_way_at_once():
    engine = with_tiers([0], most_loads=1)
    assert bid(engine).tokens == 8
    begin(engine)
    assert bid(engine) is None
    assert engine.source.ask(engine.one, 0).head(4) is None
    assert engine.source.ask(engine.one, 0).tail(4) is None
    why = engine.source.ask(engine.one, 0).why_none()
    assert (why.reason, why.detail) == (
        MissReason.BUSY, "loads under way: 1, as many as tier_loads allows",
    )  # fmt: skip
    read(engine, 0, GetOutcome.HIT)
    step(engine)
    assert bid(engine).tokens == 8
    assert bid(with_tiers([0], most_loads=2)).tokens == 8


def salted(engine, name, salt):
    """A request with a salt, whose first chunk the tier has."""
    one = request(name, range(PROMPT), cache_salt=salt)
    key, tier = Prompts(CANONICAL, engine.adapters).add(one).key(0, 0), engine.queues[0].tier
    tier.kept[key] = bytes(SIZE)
    tier.keys.add(key)
    return engine.arrive(one)


@pytest.mark.parametrize(
    ("tenants", "flood", "others"),
    [
        (None, 4, 0),
        (Tenants({}), 4, 2),
        (Tenants({tenant_of("b", None): Tenant("b", 3)}), 4, 3),
        (Tenants({}, Tenant("others", limit=0.5)), 2, 2),
    ],
    ids=["without shares", "equal", "weighted", "limited"],
)
def test_a_tenant_below_its_share_of_loads_begins_one_although_others_have_all(tenants, flood, others):
    engine = with_tiers([0], most_loads=4, tenants=tenants)
    engine.source.finished("a")

    def loads_of(salt):
        requests, begun = [salted(engine, f"{salt}{number}", salt) for number in range(6)], 0
        for one in requests:
            if engine.bid(one) is not None:
                engine.begin_load(one)
                begun += 1
        return begun, engine.source.ask(requests[-1], 0).why_none()

    begun, why = loads_of("a")
    assert begun == flood
    assert why.reason is MissReason.BUSY
    assert loads_of("b")[0] == others
    if tenants is not None:
        assert why.detail.endswith(f"and {flood} of the tenant, its fair share or more")


@pytest.mark.parametrize(("most_loads", "looking"), [(1, False), (2, True)])
def test_a_prompt_waits_for_its_keys_only_while_another_load_may_begin(tmp_path, most_loads, looking):
    engine = with_tiers([0], most_loads=most_loads)
    begin(engine)
    with slow_files():
        other = engine.arrive(request("b", range(PROMPT), lora_request=adapter(tmp_path)))
        found = engine.bid(other)
        assert (found is not None) == looking
        if looking:
            assert found.looking
        else:
            assert engine.source.ask(other, 0).why_none().reason is MissReason.BUSY


def test_a_prompt_that_is_not_stored_is_not_reported_as_busy():
    engine = with_tiers([0], most_loads=1)
    begin(engine)
    engine.source.finished("a")
    other = request("b", range(100, 100 + PROMPT))
    assert engine.source.arrived(other, {})
    assert engine.source.ask(other, 0).bids == []
    assert engine.source.ask(other, 0).why_none().reason is not MissReason.BUSY


@pytest.mark.parametrize("more", [{"prompt_embeds": object()}, {"prompt_token_ids": None}])
def test_a_request_without_chunk_keys_is_not_served(more):
    engine = with_tiers()
    assert not engine.source.arrived(request("b", range(PROMPT), **more), {})


def test_content_of_chunks_begins_where_their_writers_count_on_it():
    engine = with_tiers()
    groups = [Group(GroupKind.SLIDING, 4, attention_span, ()) for attention_span in (CHUNK, CHUNK - 1)]
    source = TierSource(
        engine.cache,
        engine.prompts,
        (*RANKS[0].groups, *groups),
        CANONICAL,
        EventStream(),
        workers=1,
        most_loads=1,
    )
    assert source.alignments("a") == (CHUNK, CHUNK, WINDOW_ALIGNMENT_TOKENS)


def parts(bids):
    assert all(bid.source == TIERS for bid in bids)
    return [{part.place: part.tokens for part in bid.parts} for bid in bids]


def test_a_bid_says_where_its_tokens_come_from():
    engine = with_tiers([0, 1, 2], [0, 1, 2, 3])
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"file": 24, "object": 4}]
    store(engine, 0)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"host": 8, "file": 16, "object": 4}]
    assert parts(engine.source.ask(engine.one, 12).bids) == [{"file": 12, "object": 4}]
    assert parts(engine.source.ask(engine.one, 24).bids) == [{"object": 4}]


def test_the_head_of_a_load_ends_at_the_alignment_and_the_tail_begins_there():
    engine = with_tiers([0, 1, 3], [2])
    bid(engine)
    assert parts([engine.source.ask(engine.one, 0).head(7)]) == [{"file": 20, "object": 8}]
    assert parts([engine.source.ask(engine.one, 0).head(12)]) == [{"file": 16, "object": 8}]
    assert parts([engine.source.ask(engine.one, 0).tail(12)]) == [{"file": 8, "object": 8}]
    assert engine.source.ask(engine.one, 0).head(32) is None
    assert engine.source.ask(engine.one, 0).tail(PROMPT) is None


def test_the_tail_of_a_prefix_is_loaded_if_its_head_is_gone():
    engine = with_tiers([1, 2])
    assert bid(engine) is None
    assert engine.source.ask(engine.one, 0).head(8) is None
    tail = engine.source.ask(engine.one, 0).tail(12)
    assert parts([tail]) == [{"file": 12}]
    span = LoadSpan(0, 24, PROMPT, (12, 24))
    load = made_up_load("a#1.1", span, [range(1, 8)], attempt="a#1", loads=2, bid=tail)
    begin_with(engine, load)
    step(engine)
    for number in (1, 2):
        read(engine, number, GetOutcome.HIT)
    told = step(engine)
    assert numbers(told) == [[1, 2]]
    assert {part.load for part in told} == {load.key}


def test_bids_with_fewer_tiers_are_made_if_configured():
    engine = with_tiers([0, 1], [0, 1, 2, 3], most_loads=1, speeds=Speeds())
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"file": 16, "object": 12}, {"file": 16}]
    store(engine, 0)
    assert parts(engine.source.ask(engine.one, 0).bids) == [
        {"host": 8, "file": 8, "object": 12},
        {"host": 8, "file": 8},
        {"host": 8},
    ]
    store(engine, 1, 2, 3)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"host": 28}], "slower tiers bring nothing"


def test_a_chunk_in_two_tiers_is_read_from_the_one_that_is_expected_to_be_faster():
    speeds, everything = Speeds(), [0, 1, 2, 3]
    engine = with_tiers(everything, everything, speeds=speeds)
    for place, seconds in (("file", 2.0), ("object", 1.0)):
        speeds.record_load([PlaceTokens(place, PROMPT)], seconds)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"object": PROMPT}]
    speeds.record_load([PlaceTokens("object", PROMPT)], 9.0)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"file": PROMPT}]
    speeds.record_load([PlaceTokens("file", PROMPT)], 90.0)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"object": PROMPT}]
    begin(engine)
    assert [len(jobs_of(queue)) for queue in engine.queues] == [0, 4]
    read(engine, 1, GetOutcome.ABSENT, tier=1)
    engine.cache.poll()
    assert [len(jobs_of(queue)) for queue in engine.queues] == [1, 3], "the slower one is asked after all"


def test_without_measured_speeds_the_order_of_the_configuration_decides():
    everything = [0, 1, 2, 3]
    assert parts([bid(with_tiers(everything, everything))]) == [{"file": PROMPT}]
    assert parts([bid(with_tiers(everything, everything, speeds=Speeds()))]) == [{"file": PROMPT}]


def lack(engine, local_tokens=0):
    assert engine.source.ask(engine.one, local_tokens).bids == []
    return engine.source.ask(engine.one, local_tokens).why_none()


def test_a_chunk_that_was_never_stored_counts_as_not_stored():
    said = SourceMiss(TIERS, MissReason.NOT_STORED, "0 full_attention", "chunk 0 of group 0 full_attention")
    assert lack(with_tiers()) == said
    engine = with_tiers()
    store(engine, 2)
    assert lack(engine) == said


def test_a_chunk_that_was_in_host_memory_recently_counts_as_evicted():
    engine = with_tiers(chunks=2)
    store(engine, 0, 1, 2, 3)
    assert lack(engine).reason is MissReason.EVICTED


def test_a_chunk_that_a_slow_tier_had_recently_counts_as_evicted():
    engine = with_tiers([0])
    engine.queues[0].tier.keys.clear()
    engine.queues[0].tier.keys.add(engine.keys[0])
    engine.queues[0].tier.keys.discard(engine.keys[0])
    assert lack(engine).reason is MissReason.EVICTED


def test_a_chunk_that_ranks_are_filling_counts_as_being_stored():
    engine = with_tiers()
    engine.cache.reserve(engine.keys[0], 0)
    assert lack(engine).reason is MissReason.STORING


def test_a_prompt_in_the_engines_own_cache_counts_as_local():
    engine = with_tiers()
    store(engine, 0, 1, 2, 3)
    assert lack(engine, local_tokens=PROMPT).reason is MissReason.LOCAL


def test_chunks_missing_after_the_engines_prefix_count_as_local():
    engine = with_tiers()
    store(engine, 0, 1)
    assert lack(engine, local_tokens=2 * CHUNK).reason is MissReason.LOCAL
    store(engine, 3)
    assert engine.source.ask(engine.one, 2 * CHUNK).bids == []
    assert engine.source.ask(engine.one, 2 * CHUNK).why_none().reason is MissReason.LOCAL
    empty = with_tiers()
    assert lack(empty).reason is MissReason.NOT_STORED


def test_a_prompt_shorter_than_a_chunk_is_reported_as_short():
    engine = with_tiers()
    engine.one = request("b", range(CHUNK - 1))
    assert engine.source.arrived(engine.one, {})
    assert lack(engine).reason is MissReason.SHORT_PROMPT


def test_chunks_of_another_namespace_are_reported_as_such():
    engine = with_tiers([])
    engine.queues[0].usage = StoreUsage(same_name_namespace="ab")
    assert lack(engine).reason is MissReason.OTHER_NAMESPACE


def test_requests_that_cannot_be_named_are_declined_with_a_reason():
    assert with_tiers().source.declined(request("b", range(PROMPT))).reason is MissReason.UNNAMED


@pytest.mark.parametrize(
    ("came", "miss"),
    [
        (GetOutcome.ABSENT, MissReason.EVICTED),
        (GetOutcome.CORRUPT, MissReason.CHECKSUM),
        (GetOutcome.IO_ERROR, MissReason.FAILED),
    ],
)
def test_a_load_fails_for_the_reason_of_its_chunk(came, miss):
    engine = with_tiers([0, 1])
    load = begin(engine)
    read(engine, 0, came)
    step(engine)
    assert engine.feeds[load.key].miss(Report("as the ranks were told")) is miss
    assert engine.feeds[load.key].miss(LATE) is MissReason.DEADLINE
    assert engine.feeds[load.key].moved(LATE) == ()


class Search:
    over = False


def searching(engine, monkeypatch, tier=0):
    """A search of this tier for the request's chunks, of which no other tier has any."""
    search, searched = Search(), engine.queues[tier].tier
    monkeypatch.setattr(searched, "find_seconds", 0.5, raising=False)
    monkeypatch.setattr(searched, "find", lambda keys, hints: search, raising=False)
    return search


def looking(engine):
    return [(one.looking, one.tokens, one.within_seconds) for one in engine.source.ask(engine.one, 0).bids]


def test_a_search_is_waited_for_and_what_it_has_found_is_offered(monkeypatch):
    engine = with_tiers((), chunks=9)
    search = searching(engine, monkeypatch)
    assert looking(engine) == [(True, PROMPT - 1, 0.5)]
    for key in engine.keys[:2]:
        engine.queues[0].tier.keys.add(key)
    search.over = True
    assert looking(engine) == [(False, 2 * CHUNK, 0.0)]


def test_what_a_search_finds_during_the_look_up_is_looked_up_again(monkeypatch):
    engine = with_tiers((), chunks=9)
    search, numbers = searching(engine, monkeypatch), engine.cache.tier_numbers

    def found_meanwhile(tags, without=()):
        found = numbers(tags, without)
        for key in engine.keys[:2]:
            engine.queues[0].tier.keys.add(key)
        search.over = True
        return found

    engine.source.ask(engine.one, 0)  # the search begins
    monkeypatch.setattr(engine.cache, "tier_numbers", found_meanwhile)
    assert [one for one, _, _ in looking(engine)] == [True]
    assert looking(engine) == [(False, 2 * CHUNK, 0.0)]


def test_what_a_slower_tier_has_may_be_found_by_a_search(monkeypatch):
    engine = with_tiers((), [0, 1, 2, 3])
    search = searching(engine, monkeypatch)
    assert looking(engine) == [(True, PROMPT, 0.5), (False, PROMPT, 0.0)]
    first, known = engine.source.ask(engine.one, 0).bids
    assert (first.parts, parts([known])) == ((PlaceTokens("fleet", PROMPT),), [{"object": PROMPT}])
    store(engine, 0)
    first, _ = engine.source.ask(engine.one, 0).bids
    assert first.parts == (PlaceTokens("host", CHUNK), PlaceTokens("fleet", PROMPT - CHUNK))
    engine.queues[0].tier.keys.add(engine.keys[1])
    search.over = True
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"host": 8, "file": 8, "object": 12}]


def test_what_a_faster_tier_has_is_not_searched_for(monkeypatch):
    engine = with_tiers([0, 1, 2, 3], ())
    searching(engine, monkeypatch, tier=1)
    assert parts(engine.source.ask(engine.one, 0).bids) == [{"file": PROMPT}]


def test_a_prompt_that_host_memory_has_waits_for_no_search(monkeypatch):
    engine = with_tiers((), chunks=9)
    searching(engine, monkeypatch)
    store(engine, 0, 1, 2, 3)
    assert looking(engine) == [(False, PROMPT, 0.0)]
