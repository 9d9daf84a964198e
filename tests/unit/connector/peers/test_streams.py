"""Other engines read a prompt while it is computed, and its lease word is raised in time."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.adapters import Adapters
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import LeaseEnded, LeaseGranted
from kvferry.connector.messages import StepOrders
from kvferry.connector.peers import producer
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.plain import PlainStep
from kvferry.connector.prompt_content import content_of
from kvferry.connector.stream import EventStream
from kvferry.geometry import GroupKind
from kvferry.transport.control_server import LeasesClaimed, LeasesReleased
from kvferry.transport.redeem import NotRedeemed, Redeem, Redeemed, Unchanged
from kvferry.transport.tickets import TicketBook
from kvferry.transport.turns import TurnIndex
from support.block_pool import BlockPool, request
from support.clock import Clock
from support.engine_info import FULL_GROUP, made_up
from transport.cards import ticket

SECONDS, WORKERS = 30.0, 2
SLIDING = CacheGroup(kind=GroupKind.SLIDING, attention_span=16, block_tokens=16)
STATE = CacheGroup(kind=GroupKind.STATE, attention_span=0, block_tokens=16)
TOKENS = 100


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(producer.time, "monotonic", clock := Clock())
    return clock


class Engine:
    """A prefill engine with one prompt, in steps as a test says."""

    def __init__(self, groups=(FULL_GROUP, SLIDING), facts: dict[str, Any] | None = None, **settings) -> None:
        self.told: list[Any] = []
        self.tickets = TicketBook(1)
        self.producer = Producer(
            made_up(groups=groups, **(facts or {})),
            ConnectorConfig(lease_seconds=SECONDS, **settings),
            incarnation=1,
            events=EventStream(self.told.append),
            names=TurnNames(Adapters()),
            adapters=Adapters(),
        )
        channel = SimpleNamespace(port=7, tickets=self.tickets, turns=TurnIndex())
        self.producer.start(channel, BlockPool(100), WORKERS)
        self.groups = groups
        self.scheduled = self.done = 0

    def arrive(self, name: str = "a", of: str = "t", **more: Any) -> Any:
        one = request(name, range(TOKENS), **{"trim_prompt": lambda: True, **more})
        one.num_computed_tokens = 0
        one.kv_transfer_params = {"do_remote_decode": True, "remote_request_id": ticket(of).hex()}
        self.producer.on_new_request(one)
        return one

    def tables(self, tokens: int) -> tuple[list[int], ...]:
        return tuple(
            [99] if group.kind is GroupKind.STATE else list(range(1, 1 + -(-tokens // 16)))
            for group in self.groups
        )

    def begin(self, one: Any, tokens: int, events: tuple[Any, ...] = ()) -> StepOrders:
        """Schedule a step that computes so many tokens."""
        orders, until = StepOrders(), one.num_computed_tokens + tokens
        self.producer.take_events(deque(events), orders)
        step = PlainStep(
            tokens={one.request_id: tokens} if tokens else {}, tables={one.request_id: self.tables(until)}
        )
        self.schedule(step, step.block_ids)
        one.num_computed_tokens = until
        return orders

    def schedule(self, step: PlainStep, block_ids: Any) -> None:
        self.scheduled += 1
        self.producer.scheduled(self.scheduled, step, block_ids)

    def step_done(self) -> None:
        self.done = min(self.done + 1, self.scheduled)
        self.producer.step_done(self.done)

    def step(self, one: Any, tokens: int, *events: Any) -> StepOrders:
        orders = self.begin(one, tokens, events)
        self.step_done()
        return orders

    def end(self, one: Any, *, complete: bool = True) -> tuple[bool, Any]:
        one.is_complete = complete
        return self.producer.finished(one, self.tables(TOKENS))

    def ask(self, known: int = 0, of: str = "t", consumer: int = 9, tokens=range(TOKENS)) -> Any:
        content = content_of(request("x", tokens), TOKENS, Adapters())
        return self.tickets.redeem(Redeem(0, consumer, ticket(of), TOKENS, content, known))


def ids(answer: Redeemed) -> list[list[int]]:
    return [table.tolist() for table in answer.grant.block_ids]


def test_tokens_are_readable_once_their_step_is_done_and_not_before(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    assert engine.ask().unknown
    engine.begin(one, 40)
    assert engine.ask().unknown, "they are being computed"
    engine.begin(one, 30)
    engine.step_done()
    assert (engine.ask().tokens, ids(engine.ask())) == (40, [[1, 2, 3], []])
    assert isinstance(engine.ask(40), Unchanged)
    engine.step_done()
    assert (engine.ask(40).tokens, ids(engine.ask(40))) == (70, [[1, 2, 3, 4, 5], []])
    assert engine.told == [LeaseGranted("a", clock.now, TOKENS, SECONDS)]


def test_the_end_of_a_step_that_was_not_seen_publishes_nothing(clock) -> None:
    engine = Engine()
    engine.scheduled = 2  # two quiet steps are under way
    one = engine.arrive()
    engine.begin(one, 40)
    engine.step_done()
    engine.step_done()
    assert engine.ask().unknown, "its step has not ended"
    engine.step_done()
    assert engine.ask().tokens == 40


def test_the_end_adds_the_last_tokens_with_windows_and_state_under_the_same_lease(clock) -> None:
    engine = Engine((FULL_GROUP, SLIDING, STATE))
    one = engine.arrive()
    engine.step(one, 60)
    some = engine.ask()
    engine.begin(one, 40)
    hold, params = engine.end(one)
    engine.step_done()
    whole = engine.ask(60)
    assert (hold, params["remote_request_id"]) == (True, ticket("t").hex())
    assert (params["remote_num_tokens"], params["remote_step_tokens"]) == (TOKENS, 256)
    assert (whole.tokens, ids(whole)) == (TOKENS, [*([[*range(1, 8)]] * 2), [99]])
    assert (whole.grant.slot, whole.grant.generation) == (some.grant.slot, some.grant.generation)
    assert len(engine.told) == 1
    orders = engine.step(one, 0, LeasesReleased(["a"]))
    assert (orders.ended.keys(), orders.raised) == ({"a"}, {})


def test_a_prompt_of_one_step_is_handed_over_under_the_ticket_that_was_drawn_for_it(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.begin(one, TOKENS)
    _, params = engine.end(one)
    engine.step_done()
    assert params["remote_request_id"] == ticket("t").hex()
    assert engine.ask().tokens == TOKENS
    assert len(engine.told) == 1


def test_a_lease_lasts_as_long_as_its_prompt_is_computed_and_its_time_begins_with_the_end(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.step(one, 40)
    clock.now += 10 * SECONDS
    assert engine.step(one, 30) == StepOrders()
    engine.begin(one, 30)
    engine.end(one)
    clock.now += SECONDS - 1
    assert engine.step(one, 0) == StepOrders()
    clock.now += 1
    assert engine.step(one, 0).ended.keys() == {"a"}


def preempted(engine: Engine, one: Any) -> tuple[Any, ...]:
    one.num_preemptions, one.num_computed_tokens = 1, 0
    return ()


def aborted(engine: Engine, one: Any) -> tuple[Any, ...]:
    assert engine.end(one, complete=False)[0] is False, "its blocks are free at once"
    assert engine.ask().unknown, "before the next step"
    return ()


def released(engine: Engine, one: Any) -> tuple[Any, ...]:
    assert engine.ask().tokens == 40
    assert engine.tickets.release(9, [ticket("t")]) == ["a"]
    return (LeasesReleased(["a"]),)


def reset(engine: Engine, one: Any) -> tuple[Any, ...]:
    engine.producer.reset()
    return ()


@pytest.mark.parametrize("how", [preempted, aborted, released, reset])
def test_when_the_engine_may_take_the_blocks_the_word_is_raised_before_the_next_step(clock, how) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.step(one, 40)
    engine.begin(one, 20)  # in flight
    slot = engine.ask(consumer=8).grant.slot if how is not released else 0
    events = how(engine, one)
    orders = StepOrders()
    engine.producer.take_events(deque(events), orders)
    assert (orders.raised, orders.ended) == ({"a": slot}, {})
    engine.schedule(PlainStep(tokens={}), lambda _: ([],))
    engine.step_done()
    assert isinstance(engine.ask(), NotRedeemed), "not even by the step that was in flight"
    assert sum(isinstance(event, LeaseEnded) for event in engine.told) == 1
    if how is not aborted:
        one.num_computed_tokens = 0
        engine.step(one, 40)
        assert isinstance(engine.ask(), NotRedeemed)
        assert engine.end(one) == (False, {
            "do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0
        })  # fmt: skip
    book = engine.producer._book
    assert len(book) == 1, "the word is not used again before all workers have raised it"
    engine.producer.on_workers_confirmed({"a": 1})
    assert len(book) == 1
    engine.producer.on_workers_confirmed({"a": 1})
    assert len(book) == 0
    assert not engine.producer._streams._streams


def test_a_request_preempted_before_its_first_step_was_done_is_streamed_anew(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.begin(one, 40)
    one.num_preemptions, one.num_computed_tokens = 1, 0
    engine.begin(one, 20)
    engine.step_done()
    assert engine.ask().unknown, "its blocks were taken while they were computed"
    engine.step_done()
    assert engine.ask().tokens == 20


def test_a_ticket_that_another_prompt_has_changes_nothing_for_it(clock) -> None:
    engine = Engine()
    first = engine.arrive("a")
    engine.step(first, 40)
    second = engine.arrive("b", prompt_token_ids=list(range(200, 200 + TOKENS)))
    second.all_token_ids = second.prompt_token_ids
    engine.step(second, 50)
    assert engine.ask().tokens == 40
    assert engine.ask(tokens=range(200, 200 + TOKENS)).reason.startswith("the offered blocks hold other")
    _, params = engine.end(second)
    assert params["remote_request_id"] != ticket("t").hex()
    assert engine.end(first)[1]["remote_request_id"] == ticket("t").hex()


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        ({"speculates": True}, {}),
        ({"writes_before_hooks": True}, {}),
        ({}, {"host_buffer": True}),
        ({"parent_of": lambda name: name[:1]}, {}),
        ({"groups": (SLIDING,)}, {}),
    ],
    ids=["drafts", "early writes", "host buffer", "samples", "windows alone"],
)
def test_where_tokens_are_not_final_after_their_step_nothing_is_readable_before_the_end(
    clock, facts, settings
) -> None:
    engine = Engine(facts.pop("groups", (FULL_GROUP, SLIDING)), facts, **settings)
    one = engine.arrive()
    engine.step(one, 40)
    assert engine.ask().unknown
    engine.begin(one, 60)
    hold, params = engine.end(one)
    assert hold
    assert (params["remote_step_tokens"] == 0) == ("parent_of" not in facts)


def test_blocks_that_another_connector_fills_are_not_readable_before_the_end(clock) -> None:
    engine = Engine()
    engine.arrive()
    engine.producer.take_events(deque(), StepOrders())
    engine.schedule(PlainStep(tokens={"a": 40}), lambda _: ([0, 0, 0], [0, 0, 0]))
    engine.step_done()
    assert engine.ask().unknown


def test_an_engine_that_offers_no_more_begins_no_stream(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.begin(one, 40)
    engine.producer.stop_offering()
    engine.step_done()
    engine.step(engine.arrive("b", "u"), 40)
    assert engine.ask().unknown
    assert engine.ask(of="u").unknown
    assert engine.end(one)[0] is False


def test_heartbeats_of_a_reader_reach_the_lease_of_a_prompt_that_is_computed(clock) -> None:
    engine = Engine()
    one = engine.arrive()
    engine.step(one, 40)
    engine.ask()
    assert engine.tickets.claimed(9, [ticket("t")]) == ["a"]
    assert engine.step(one, 10, LeasesClaimed(["a"])) == StepOrders()


@pytest.mark.parametrize("given", [None, "", "x" * 32, "0" * 31, 7, ["0" * 32]])
def test_what_is_no_ticket_is_not_used_as_one(clock, given) -> None:
    engine = Engine()
    one = request("a", range(TOKENS), trim_prompt=lambda: True, is_complete=True)
    one.kv_transfer_params = {"do_remote_decode": True, "remote_request_id": given}
    engine.producer.on_new_request(one)
    assert not engine.producer._streams._streams
    assert engine.producer.finished(one, engine.tables(TOKENS))[0]
