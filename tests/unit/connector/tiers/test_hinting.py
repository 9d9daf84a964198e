"""Hints of two tenants, over an engine without a model that stores chunks in host memory."""

from __future__ import annotations

import logging

import pytest

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.prefetching import KEPT_SECONDS
from kvferry.common.errors import ConfigError
from kvferry.connector.blocks import PartBlocks
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Prompts
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import Hinted, RetainedBytes
from kvferry.connector.messages import StepReports
from kvferry.connector.tiers.hinting import Hinting
from kvferry.connector.tiers.storing import StoreOrders, Storing
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.read_plan import Report
from support.block_pool import request
from support.fake_engine import FakeEngine, PartialHalf, counted, events_of
from support.models import attention, model, state
from support.slow_tiers import fake_tiers, queue_by_hand

CHUNK, BLOCK, CHUNKS = 8, 4, 40


class HintedHalf(PartialHalf):
    """A scheduler half that stores chunks and applies hints, as `Tiering` does."""

    hinting = None

    def on_new_request(self, request):
        self.requests[request.request_id] = request
        if self.prompts.add(request) is not None:
            self.storing.on_new_request(request, self.hinting.on_new_request(request))

    def finished(self, request, block_ids):
        used = self.storing.finished(request, block_ids)
        if (apply := self.hinting.finished(request, used)) is not None:
            self.stores.when_ended(request.request_id, apply)
        self.prompts.remove(request.request_id)
        return False, None


def hinted(*stores, share=0.25, seconds=600.0):
    """An engine with host memory of 40 chunks, and a slow tier that a test lets answer."""
    ranks = lay_out(
        model(*(stores or (attention(),))), EngineShape(1, (len(stores) or 1,), BLOCK, "LBHNC", 99)
    )
    groups, canonical = ranks[0].groups, canonical_form_of(ranks, CHUNK)
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
        blocks=600,
    )
    (engine.tier,) = fake_tiers([])
    size = max(group.chunk_bytes for group in canonical.groups)
    engine.host = HostTier(
        CHUNKS * size, [one.chunk_bytes for one in canonical.groups], EVICTION_POLICIES["lru"],
        engine.tier.keys.table,
    )  # fmt: skip
    engine.slow = queue_by_hand(engine.tier, engine.clock)
    engine.cache = ChunkCache(
        engine.host, lambda _, size: memoryview(bytearray(size)), canonical.groups, [engine.slow],
        clock=engine.clock,
    )  # fmt: skip
    prompts, parts = Prompts(canonical, engine.adapters), PartBlocks(groups, engine.pool)
    stores = StoreOrders(engine.cache, engine.pool, 1, canonical.labels, engine.events)
    storing = Storing(engine.cache, prompts, canonical, groups, parts, stores, CHUNK)
    config = ConnectorConfig(hint_share=share, hint_seconds=seconds)
    engine.half = HintedHalf(prompts=prompts, storing=storing, stores=stores)
    engine.half.hinting = engine.hinting = Hinting(
        engine.cache, prompts, groups, canonical, config, engine.events, engine.clock
    )
    engine.prompts, engine.names = prompts, iter(range(10_000))
    return engine


def arrive(engine, tokens, tenant="a", hints=None, session=None, **more):
    params = {"kv_transfer_params": {"hints": hints}} if hints is not None else {}
    one = request(f"r{next(engine.names)}", tokens, cache_salt=tenant, session_id=session, **params, **more)
    return engine.arrive(one)


def compute(engine, one, snapshots=()):
    orders = engine.step((one, one.num_tokens), snapshots=snapshots)
    engine.finish(one)
    for order in (*orders.stores, *engine.half.stores.take()):
        engine.half.take_reports(StepReports(reports={order.key: Report(None)}))
    poll(engine)


def serve(engine, tokens, tenant="a", hints=None, session=None):
    """Serve a request from its arrival to the end of its stores."""
    compute(engine, arrive(engine, tokens, tenant, hints, session))


def poll(engine):
    for jobs in (engine.slow.write_jobs.jobs, engine.slow.read_jobs.jobs):
        for _ in range(len(jobs)):
            jobs.popleft()()
    engine.cache.poll()
    engine.hinting.poll()
    engine.hinting.step_done()
    engine.host.check_integrity()


def flood(engine, tenant="b", prompts=12):
    """Store more than host memory has room for, for a tenant."""
    for number in range(prompts):
        serve(engine, range(1000 + 100 * number, 1000 + 100 * number + 64), tenant)


def here(engine, tokens, tenant="a"):
    """Numbers of a prompt's whole chunks in host memory."""
    chunks = engine.prompts.chunks_of(request("look", tokens, cache_salt=tenant))
    keys = [chunks.key(0, number) for number in range(len(tokens) // CHUNK)]
    return [number for number, found in enumerate(engine.host.contains(keys).tolist()) if found]


def told(engine):
    """(hint, outcome) of each event about hints since the last call."""
    found = [(str(one.hint), str(one.outcome)) for one in events_of(engine, Hinted)]
    engine.told.clear()
    return found


RETAIN = {"spans": [{"retain_seconds": 60}]}
PROMPT = range(64)


def test_retained_chunks_survive_what_another_tenant_stores_and_others_do_not():
    engine = hinted()
    serve(engine, PROMPT, hints=RETAIN)
    serve(engine, range(100, 164))  # the control
    flood(engine)
    assert here(engine, PROMPT) == [*range(8)]
    assert here(engine, range(100, 164)) == []
    assert told(engine) == [("retain", "applied")]
    engine.clock.now += 60
    poll(engine)
    flood(engine)
    assert here(engine, PROMPT) == []


def test_a_tenant_retains_no_more_than_the_share_whatever_it_asks_for():
    engine = hinted()
    greedy = {"spans": [{"retain_seconds": 1e9, "priority": 100}]}
    for number in range(6):
        serve(engine, range(100 * number, 100 * number + 64), hints=greedy)
    serve(engine, PROMPT, "b", RETAIN)
    flood(engine, "c")
    assert (
        len(engine.host)
        - sum(len(here(engine, range(1000 + 100 * n, 1064 + 100 * n), "c")) for n in range(12))
        == 10
    )
    assert here(engine, PROMPT, "b") == [0, 1, 2, 3, 4], "half of the share"
    assert counted(engine)["hints retain partial"] >= 1
    engine.clock.now += 600  # hint_seconds
    poll(engine)
    assert [one.size for one in events_of(engine, RetainedBytes)][-1] == 0


def test_a_span_retains_its_chunks_alone():
    engine = hinted()
    serve(engine, PROMPT, hints={"spans": [{"end": 20, "retain_seconds": 60}]})
    flood(engine)
    assert here(engine, PROMPT) == [0, 1, 2]


def test_chunks_of_lower_priority_give_way_within_a_tenant():
    engine = hinted()
    low, high = ({"spans": [{"retain_seconds": 60, "priority": priority}]} for priority in (1, 2))
    serve(engine, PROMPT, hints=low)
    serve(engine, range(100, 164), hints=high)
    flood(engine)
    assert here(engine, PROMPT) == [0, 1]
    assert here(engine, range(100, 164)) == [*range(8)]


def test_nothing_is_stored_from_an_excluded_token_on():
    engine = hinted()
    serve(engine, range(70), hints={"spans": [{"start": 20, "end": 24, "store": False}]})
    poll(engine)
    assert here(engine, range(70)) == [0, 1]
    assert len(engine.host) == len(engine.tier.kept) == 2, "no tail and no later chunk, in no tier"
    assert told(engine) == [("no_store", "applied")]
    serve(engine, range(70), "b")  # the control
    assert len(engine.host) == 2 + 9


def test_no_snapshot_after_an_excluded_token_is_stored():
    engine = hinted(attention(), state())
    for tenant, hints, stored in (
        ("a", {"spans": [{"start": 32, "store": False}]}, [16, 32]),
        ("b", None, [16, 32, 48, 64]),
    ):
        one = arrive(engine, PROMPT, tenant, hints)
        compute(engine, one, snapshots=[(one, tokens) for tokens in (16, 32, 48, 64)])
        chunks = engine.prompts.chunks_of(request("look", PROMPT, cache_salt=tenant))
        keys = [chunks.key(1, tokens // CHUNK - 1) for tokens in (16, 32, 48, 64)]
        found = engine.host.contains(keys).tolist()
        assert [tokens for tokens, has in zip((16, 32, 48, 64), found, strict=True) if has] == stored


def test_at_the_end_of_a_session_its_own_chunks_are_evicted_first():
    engine = hinted()
    serve(engine, PROMPT, session="s", hints=RETAIN)
    serve(engine, [*range(16), *range(500, 548)], session="other")
    serve(engine, range(200, 208), "b")
    serve(engine, range(72), session="s", hints={"ends_session": True})
    flood(engine, prompts=4)
    assert here(engine, PROMPT) == [0, 1], "only what another session has too is left"
    assert here(engine, range(200, 208), "b") == [0]
    assert told(engine) == [("retain", "applied"), ("end_session", "applied")]


def test_no_tenant_ends_another_ones_session():
    engine = hinted()
    flood(engine, prompts=3)
    serve(engine, PROMPT, "a", session="s")
    serve(engine, range(9), "b", session="s", hints={"ends_session": True})
    serve(engine, range(300, 309), "b", hints={"ends_session": True})
    assert told(engine) == [("end_session", "applied"), ("end_session", "ignored")]
    serve(engine, range(400, 464))
    assert here(engine, PROMPT) == [*range(8)]
    assert engine.hinting.end_session(("b", "s")) == 0
    assert engine.hinting.end_session(("a", "s")) == 8


def evicted(engine, tokens, tenant="a", session=None):
    """Serve a prompt, which the slow tier then has, and evict it from host memory."""
    serve(engine, tokens, tenant, session=session)
    poll(engine)
    flood(engine, "other")
    assert here(engine, tokens, tenant) == []


@pytest.mark.parametrize("hints", [{"prefetch": "prompt"}, None])
def test_a_prompt_is_in_host_memory_before_the_engine_schedules_it_if_it_is_prefetched(hints):
    engine = hinted()
    evicted(engine, PROMPT)
    arrive(engine, PROMPT, hints=hints)
    for _ in range(3):
        poll(engine)
    # The last token is computed in any case.
    assert here(engine, PROMPT) == ([*range(8)] if hints else [])
    assert told(engine) == ([("prefetch", "applied")] if hints else [])


def test_a_short_request_prefetches_what_its_session_had_and_no_other_tenants():
    engine = hinted()
    evicted(engine, PROMPT, session="s")
    for tenant, found in (("b", []), ("a", [*range(8)])):
        arrive(engine, [1], tenant, {"prefetch": "session"}, "s")
        for _ in range(3):
            poll(engine)
        assert here(engine, PROMPT) == found
    assert told(engine) == [("prefetch", "ignored"), ("prefetch", "applied")]


def test_an_operator_prefetches_a_prompt_and_a_session():
    engine = hinted()
    evicted(engine, PROMPT, session="s")
    asked = request("admin", PROMPT, cache_salt="a")
    assert engine.hinting.prefetch(asked) == (8, 0)
    assert engine.hinting.busy
    for _ in range(3):
        poll(engine)
    assert not engine.hinting.busy
    assert engine.hinting.prefetch(asked) == engine.hinting.prefetch_session(("a", "s")) == (8, 8)
    with pytest.raises(ConfigError, match="no session unknown"):
        engine.hinting.prefetch_session(("a", "unknown"))


def test_prefetched_chunks_count_as_retained_for_a_while():
    engine = hinted()
    evicted(engine, PROMPT)
    engine.hinting.prefetch(request("admin", PROMPT, cache_salt="a"))
    for _ in range(3):
        poll(engine)
    flood(engine)
    assert here(engine, PROMPT) == [*range(8)]
    engine.clock.now += KEPT_SECONDS
    poll(engine)
    flood(engine)
    assert here(engine, PROMPT) == []


def test_without_a_share_nothing_is_retained_or_prefetched_but_hints_not_to_store_count():
    engine = hinted(share=0.0)
    evicted(engine, PROMPT, session="s")
    with pytest.raises(ConfigError, match="hint_share is 0"):
        engine.hinting.prefetch_session(("a", "s"))
    hints = {"spans": [{"end": 8, "retain_seconds": 60}, {"start": 8, "store": False}], "prefetch": "session"}
    serve(engine, range(400, 464), session="s", hints=hints)
    assert here(engine, range(400, 464)) == [0]
    flood(engine)
    assert here(engine, range(400, 464)) == []
    assert told(engine) == [("no_store", "applied"), ("prefetch", "ignored"), ("retain", "ignored")]


def test_malformed_hints_are_ignored_with_one_line_in_the_log(caplog):
    caplog.set_level(logging.WARNING)
    engine = hinted()
    for _ in range(3):
        serve(engine, PROMPT, hints={"spans": [{"retain_seconds": "long"}]})
    assert here(engine, PROMPT) == [*range(8)]
    assert told(engine) == [("malformed", "ignored")] * 3
    assert len(caplog.records) == 1
    assert "send an object as in docs/hints.md" in caplog.text


def test_a_forgotten_salt_and_a_reset_give_everything_up():
    engine = hinted()
    serve(engine, PROMPT, "a", RETAIN, "s")
    serve(engine, PROMPT, "b", RETAIN, "s")
    engine.hinting.forget_salt("a")
    flood(engine, "c")
    assert (here(engine, PROMPT, "a"), here(engine, PROMPT, "b")) == ([], [*range(5)])
    engine.hinting.clear()
    engine.cache.clear()
    poll(engine)
    assert engine.host.holds == 0
    assert engine.hinting.end_session(("b", "s")) == 0
