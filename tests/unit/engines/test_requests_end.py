"""Every request ends: each admission computes tokens or leaves fewer to load. Over vLLM's scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, event, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm import SamplingParams
from vllm.v1.request import Request

from kvferry.connector import admission, choosing
from kvferry.connector.config import ConnectorConfig
from kvferry.engines.vllm.compat.requests import VLLMRequest
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.transport.control_server import LeaseClaims
from support.clock import Clock
from support.examples import examples
from support.vllm_cache import BLOCK
from support.vllm_scheduler import ATTEMPTS, PATIENCE, SETTINGS, OfferingConnector, VllmScheduler

pytestmark = pytest.mark.slow

CLOCK = Clock()
KINDS = [
    ("full",),
    ("full", "window"),
    ("full", "chunked"),
    ("full", "state"),
    ("full", "wide window", "window"),
]
ENDS = [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 64, 65, 128, 129]
"""Prompt lengths at which something ends: a prompt, a block, a step."""


OFFERED = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
"""Of a request whose prompt is kept for another engine."""


class Serving(RuleBasedStateMachine):
    """Requests come, load, fail, are preempted and go away, as they like; so do consumers of prompts."""

    @initialize(
        kinds=st.sampled_from(KINDS),
        blocks=st.integers(38, 70),  # the longest request has room, as vLLM sees to at its start
        overlaps=st.booleans(),
        role=st.sampled_from(["kv_both", "kv_producer", "kv_consumer"]),
        strikes=st.booleans(),
        most_held=st.sampled_from([None, 8, 20]),
        seed=st.integers(0, 99),
        drafts=st.sampled_from([0, 3]),
    )
    def start(self, kinds, blocks, overlaps, role, strikes, most_held, seed, drafts):
        self.engine = VllmScheduler(
            kinds,
            blocks + drafts,
            overlaps=overlaps,
            role=role,
            seed=seed,
            connector=OfferingConnector,
            drafts=drafts,
            clock=CLOCK,
        )
        self.free = self.engine.pool.get_num_free_blocks()
        for source in self.engine.connector.sources:
            source.strikes, source.most_held = strikes, most_held
        self.most_held = most_held
        self.asked, self.aborted = [], set()

    @rule(
        tokens=st.one_of(st.sampled_from(ENDS), st.integers(1, 300)),
        text=st.integers(0, 1),
        answer=st.integers(1, 20),
        offers=st.booleans(),
        data=st.data(),
    )
    def ask(self, tokens, text, answer, offers, data):
        offered = st.one_of(st.sampled_from([0, tokens - 1, tokens]), st.integers(0, tokens))
        totals = {source.name: data.draw(offered) for source in self.engine.connector.sources}
        sampling = OFFERED if offers else None
        asked = self.engine.ask(range(1000 * text, 1000 * text + tokens), answer, sampling, **totals)
        self.asked.append(asked)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            CLOCK.now += PATIENCE / 20
            self.engine.step()

    @precondition(lambda self: self.engine.loading)
    @rule(data=st.data(), how=st.sampled_from(["ready", "ready", "failed", "late"]))
    def end(self, data, how):
        load = data.draw(st.sampled_from(self.engine.loading))
        self.engine.end(load, None if how == "ready" else how, late=how == "late")

    @rule()
    def land(self):
        self.engine.land()

    @precondition(lambda self: self.engine.connector.leases)
    @rule(data=st.data(), released=st.booleans())
    def hear(self, data, released):
        event("a consumer's release" if released else "a consumer's claim")
        lease = data.draw(st.sampled_from(self.engine.connector.leases))
        self.engine.connector.heard.append(LeaseClaims([lease], released))

    @rule()
    def confirm_ended_leases(self):
        self.engine.confirm_ended_leases()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        one = data.draw(st.sampled_from(self.asked))
        if one.request_id not in self.engine.answered:
            self.engine.abort(one.request_id)
            self.aborted.add(one.request_id)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self):
        event("preempted")
        self.engine.preempt()

    @invariant()
    def each_load_brings_a_request_further(self):
        if not hasattr(self, "engine"):
            return
        connector = self.engine.connector
        for local_tokens, total, tokens in connector.loads:
            event("loaded all" if total == tokens else "loaded a part")
            assert min(total, tokens - 1) > local_tokens, "the last token is computed, whatever was loaded"
        connector.loads.clear()
        assert connector.most <= ATTEMPTS + 1, "nothing was computed between so many admissions"

    @invariant()
    def no_step_in_flight_writes_what_a_load_was_given(self):
        assert not hasattr(self, "engine") or not self.engine.torn

    @invariant()
    def the_first_step_after_a_load_finds_the_state_where_it_was_loaded(self):
        assert not hasattr(self, "engine") or not self.engine.misplaced

    @invariant()
    def loads_hold_no_more_than_they_may_if_they_are_late(self):
        if hasattr(self, "engine") and self.most_held is not None:
            book = self.engine.connector.book
            peers = [load for load in book if load.holder == "peer"]
            assert book.held.get("peer", 0) <= self.most_held or len(peers) == 1
            blocks = [block for load in book for block in load.blocks]
            assert len(blocks) == sum(book.held.values())
            assert all(block.ref_cnt > 0 for block in blocks), "a load may write a block that is free"
            late = [load for load in book if load.late]
            event("late reads hold blocks" if late else "no read is late")
            assert book.late_blocks() == sum(len(load.blocks) for load in late)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        expected = {one.request_id for one in self.asked} - self.aborted
        for _ in range(1000):
            if not self.engine.scheduler.requests and not self.engine.loading:
                break
            self.step(1)
            for load in list(self.engine.loading):
                self.engine.end(load)
            self.engine.land()
            self.engine.confirm_ended_leases()
            self.each_load_brings_a_request_further()
        assert expected <= self.engine.answered | self.aborted, "a request never ends"
        for _ in range(3):
            self.step(1)
        assert len(self.engine.connector.book) == len(self.engine.connector.admission) == 0
        assert not self.engine.connector.admission._loaded, "attempts of a request that has ended"
        assert not self.engine.connector.leases
        producer = self.engine.connector.producer
        assert (producer._offered, producer._leaving) == ({}, {})
        assert self.engine.pool.get_num_free_blocks() == self.free


TestServing = Serving.TestCase
TestServing.settings = examples(
    40,
    stateful_step_count=40,
    phases=(Phase.reuse, Phase.generate),  # to shrink takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_go_on_from_the_states_that_were_loaded_whether_they_speculate_or_not(drafts, overlaps):
    draw = random.Random(drafts)
    engine = VllmScheduler(("full", "state"), 80, overlaps=overlaps, drafts=drafts, clock=CLOCK)
    free, asked = engine.pool.get_num_free_blocks(), []
    while len(asked) < 60 or engine.scheduler.requests:
        CLOCK.now += PATIENCE / 20
        if len(asked) < 60 and draw.random() < 0.3:
            tokens = draw.choice([*ENDS, 100, 200])
            offered = draw.choice([0, tokens // 2, tokens - 1, tokens])
            text = range(1000 * len(asked), 1000 * len(asked) + tokens)
            asked.append(engine.ask(text, draw.randint(1, 30), tiers=offered))
        if engine.scheduler.running and draw.random() < 0.05:
            engine.preempt()
        engine.step()
        for load in list(engine.loading):
            if draw.random() < 0.5:
                engine.end(load)
    assert engine.answered == {one.request_id for one in asked}
    assert engine.continued > 20
    assert (engine.accepted > 20) == (drafts > 0)
    assert not engine.misplaced
    assert not engine.torn
    assert engine.pool.get_num_free_blocks() == free


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_a_prompt_of_which_sources_have_all_is_loaded_once_whatever_its_length(kinds, overlaps) -> None:
    """Alone, so that each step is its own: one load, and the step that computes its last token."""
    for tokens in range(1, 2 * BLOCK + 2):
        engine = VllmScheduler(kinds, overlaps=overlaps, clock=CLOCK)
        one = engine.ask(range(tokens), 1, tiers=tokens)
        steps = 0
        while one.request_id not in engine.answered:
            engine.step()
            for load in list(engine.loading):
                engine.end(load)
            steps += 1
            assert steps <= 3 + overlaps, f"a prompt of {tokens} tokens"
        assert engine.connector.loads == ([(0, tokens, tokens)] if tokens > 1 else [])


def test_vllm_asks_again_for_a_prompt_of_one_token_that_was_loaded(monkeypatch) -> None:
    """When this fails vLLM has mended it, and a load may bring the only token of a prompt."""
    monkeypatch.setattr(admission, "must_compute", lambda *_: None)
    monkeypatch.setattr(choosing, "saves_computation", lambda _: True)
    engine = VllmScheduler(clock=CLOCK)
    one = engine.ask([7], tiers=1)
    for _ in range(ATTEMPTS):
        engine.step()
        assert [load.request_id for load in engine.loading] == [one.request_id]
        engine.end(engine.loading[0])
    assert engine.connector.admissions[one.request_id] == ATTEMPTS
    for _ in range(5):
        engine.step()
    assert engine.answered == {one.request_id}, "its attempts are used up, and it is computed"


def test_a_prefill_engine_loads_for_a_prompt_of_two_tokens_no_more_than_for_one_of_one() -> None:
    """Its last token is dropped, since the consumer computes it."""
    engine = VllmScheduler(clock=CLOCK)
    one = engine.ask([7, 8], answer=1, tiers=2)
    assert VLLMRequest(one, BLOCK).trim_prompt()
    for _ in range(2):
        engine.step()
    assert engine.answered == {one.request_id}
    assert engine.connector.loads == []


def test_a_source_that_hangs_holds_no_more_than_it_may_and_others_go_on() -> None:
    engine = VllmScheduler(blocks=100, seats=64, clock=CLOCK)
    tiers, peer = engine.connector.sources
    tiers.most_held = peer.most_held = 40
    hung = [engine.ask(range(n, n + 65), answer=1, peer=64) for n in range(0, 3000, 100)]
    for _ in range(60):
        CLOCK.now += PATIENCE / 20
        engine.step()
    held, late = engine.connector.book.held, list(engine.loading)
    assert 0 < held["peer"] <= 20 < sum(len(engine.connector.book[load.key].blocks) for load in late) + 4
    assert len(engine.answered) == len(hung) - len(late), "the others are computed, once they have waited"
    for load in late:
        engine.end(load, "its deadline has passed", late=True)
    assert engine.connector.book.late_blocks() == held["peer"] <= 20
    other = engine.ask(range(9000, 9065), answer=1, tiers=64)
    for _ in range(20):
        CLOCK.now += PATIENCE / 20
        engine.step()
    assert [load.request_id for load in engine.loading] == [other.request_id]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_unclaimed_leases_end_after_a_quarter_of_their_time_if_a_prompt_waits(kinds, overlaps) -> None:
    """Clients have left between both engines, and their prompts hold the prefill engine's blocks."""
    engine = VllmScheduler(kinds, 40, overlaps=overlaps, connector=OfferingConnector, clock=CLOCK)
    leases, seconds = engine.connector.leases, ConnectorConfig().lease_seconds
    free = left = engine.pool.get_num_free_blocks()
    taken = 0
    while left >= 2 * taken:
        one = engine.ask(range(100 * engine.count, 100 * engine.count + 65), 1, sampling=OFFERED)
        for _ in range(4):
            engine.step()
        assert one.request_id in engine.answered
        taken, left = left - engine.pool.get_num_free_blocks(), engine.pool.get_num_free_blocks()
    claimed = leases[0]
    engine.connector.heard.append(LeaseClaims([claimed]))
    waits = engine.ask(range(9000, 9000 + 8 * BLOCK), 1)
    begun = CLOCK.now
    while waits.request_id not in engine.answered:
        assert CLOCK.now <= begun + seconds / 4 + 1, "it waits until the leases expire"
        CLOCK.now += 0.1
        engine.step()
        engine.confirm_ended_leases()
    assert CLOCK.now >= begun + seconds / 4, "consumers have had time to claim them"
    assert leases[0] == claimed
    CLOCK.now += seconds
    for _ in range(3):
        engine.step()
        engine.confirm_ended_leases()
    assert (len(leases), engine.pool.get_num_free_blocks()) == (0, free)


def aborted_while_a_step_writes(role: str, **settings: bool) -> VllmScheduler:
    """A request is aborted in the step that computes it; the next one loads into the few blocks there are."""
    engine = VllmScheduler(blocks=6, overlaps=True, role=role, clock=CLOCK, settings=settings)
    engine.ask(range(64), answer=9)
    engine.step()
    engine.abort("r1")
    engine.ask(range(100, 165), answer=1, tiers=64)
    engine.step()
    return engine


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
def test_a_load_is_given_no_block_that_a_step_in_flight_writes_whatever_the_role(role) -> None:
    engine = aborted_while_a_step_writes(role)
    assert not engine.loading, "blocks are given back when the step is over"
    engine.step()
    engine.step()
    assert [load.request_id for load in engine.loading] == ["r2"]
    assert not engine.torn


def test_vllm_alone_gives_a_producers_load_blocks_that_a_step_still_writes() -> None:
    """When this fails, vLLM defers frees for every engine that loads, and `defer_frees` is not needed."""
    assert aborted_while_a_step_writes("kv_producer", defers=False).torn


@pytest.mark.parametrize("connector", [KVFerryConnector, FerryMultiConnector])
def test_kvferrys_connectors_make_vllm_defer_frees(connector) -> None:
    engine = VllmScheduler(
        overlaps=True, role="kv_producer", connector=connector, settings=SETTINGS[connector]
    )
    assert engine.scheduler.defer_block_free


@pytest.mark.parametrize("how", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}, {}], ids=str)
def test_a_prompt_that_reads_no_cache_is_neither_cut_for_a_consumer_nor_loaded(how) -> None:
    engine = VllmScheduler(clock=CLOCK)
    one = engine.ask(range(40), answer=1, tiers=40, sampling=how)
    assert VLLMRequest(one, BLOCK).trim_prompt() == (not how)
    engine.step()
    assert bool(engine.connector.loads) == (not how)
    assert (one.request_id in engine.answered) == bool(how)


def test_samples_that_share_their_prompt_are_each_cut_by_one_token() -> None:
    """In an engine that shares its process with the API they share the list."""
    text = list(range(40))
    samples = [Request(f"{n}_r", text, SamplingParams(max_tokens=1), None) for n in range(2)]
    assert all(VLLMRequest(one, BLOCK).trim_prompt() for one in samples)
    assert [one.prompt_token_ids for one in samples] == [list(range(39))] * 2
    assert text == list(range(40))
