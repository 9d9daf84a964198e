"""Other engines read a prompt while it is computed, and its lease word is raised in time."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.content import Adapters, content_of
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import LeaseEnded, LeaseGranted
from kvferry.connector.messages import StepOrders
from kvferry.geometry import GroupKind
from kvferry.transport.control_server import LeaseClaims
from kvferry.transport.offer import write_nothing
from kvferry.transport.redeem import NotRedeemed, Redeem, Redeemed, Unchanged
from support.block_pool import request
from support.engine_info import FULL_GROUP
from support.fake_engine import FakeEngine, events_of
from support.producers import LEASE_SECONDS, confirm, hear, producing
from transport.cards import ticket

SLIDING = CacheGroup(kind=GroupKind.SLIDING, attention_span=16, block_tokens=16)
STATE = CacheGroup(kind=GroupKind.STATE, attention_span=0, block_tokens=16)
TOKENS = 100
NOTHING_TO_DO = StepOrders()


def start(groups=(FULL_GROUP, SLIDING), **more: Any) -> FakeEngine:
    return producing(groups, blocks=100, workers=2, **more)


def arrive(engine: FakeEngine, name: str = "a", of: str = "t", **more: Any) -> Any:
    params = {"do_remote_decode": True, "remote_request_id": ticket(of).hex()}
    given = {"trim_prompt": lambda: True, "kv_transfer_params": params, **more}
    return engine.arrive(request(name, range(TOKENS), **given))


def ask(engine: FakeEngine, known: int = 0, of: str = "t", consumer: int = 9, tokens=range(TOKENS)) -> Any:
    content = content_of(request("x", tokens), TOKENS, Adapters())
    return engine.channel.tickets.redeem(Redeem(0, consumer, ticket(of), TOKENS, content, known))


def granted(answer: Redeemed) -> tuple[int, tuple[list[int], ...]]:
    return answer.grant.tokens, tuple(table.tolist() for table in answer.grant.block_ids)


def ended(orders: StepOrders) -> tuple[set[str], set[str]]:
    """Ended leases of finished requests, and of requests that are still computed."""
    return set(orders.ended), set(orders.raised)


def test_tokens_are_readable_once_their_step_is_done_and_not_before() -> None:
    engine = start()
    one = arrive(engine)
    assert ask(engine).unknown
    engine.begin((one, 40))
    assert ask(engine).unknown, "they are being computed"
    engine.begin((one, 30))
    engine.half.step_done()
    table, _ = engine.table_ids(one)
    assert granted(ask(engine)) == (40, (table[:3], []))
    assert isinstance(ask(engine, 40), Unchanged)
    engine.half.step_done()
    assert granted(ask(engine, 40)) == (70, (table[:5], []))
    assert engine.told == [LeaseGranted("a", engine.clock.now, TOKENS, LEASE_SECONDS)]


def test_the_end_of_a_quiet_step_publishes_nothing() -> None:
    engine = start()
    engine.half.scheduled = 2  # two quiet steps are under way
    one = arrive(engine)
    engine.begin((one, 40))
    engine.half.step_done()
    engine.half.step_done()
    assert ask(engine).unknown, "its step has not ended"
    engine.half.step_done()
    assert ask(engine).grant.tokens == 40


def test_the_end_adds_the_last_tokens_with_windows_and_state_under_the_same_lease() -> None:
    engine = start((FULL_GROUP, SLIDING, STATE))
    one = arrive(engine)
    engine.step((one, 60))
    some = ask(engine)
    engine.begin((one, 40))
    tables = engine.table_ids(one)
    hold, params = engine.finish(one)
    engine.half.step_done()
    whole = ask(engine, 60)
    assert (hold, params["remote_request_id"]) == (True, ticket("t").hex())
    assert (params["remote_num_tokens"], params["remote_step_tokens"]) == (TOKENS, 256)
    assert "remote_sealed_grant" not in params, "its readers have redeemed the ticket"
    assert granted(whole) == (TOKENS, tables)
    assert (whole.grant.slot, whole.grant.generation) == (some.grant.slot, some.grant.generation)
    assert len(engine.told) == 1
    assert ended(hear(engine, LeaseClaims(["a"], released=True))) == ({"a"}, set())


def test_a_prompt_of_one_step_is_offered_under_the_ticket_of_its_router() -> None:
    engine = start()
    one = arrive(engine)
    engine.begin((one, TOKENS))
    _, params = engine.finish(one)
    engine.half.step_done()
    assert params["remote_request_id"] == ticket("t").hex()
    assert ask(engine).grant.tokens == TOKENS
    assert len(engine.told) == 1


def test_the_time_of_a_lease_begins_when_its_prompt_is_complete() -> None:
    engine = start()
    one = arrive(engine)
    engine.step((one, 40))
    engine.clock.now += 10 * LEASE_SECONDS
    assert ended(engine.step((one, 30))) == (set(), set())
    engine.begin((one, 30))
    engine.finish(one)
    engine.clock.now += LEASE_SECONDS - 1
    assert hear(engine) == NOTHING_TO_DO
    engine.clock.now += 1
    assert ended(hear(engine)) == ({"a"}, set())


def preempted(engine: FakeEngine, one: Any) -> tuple[Any, ...]:
    engine.preempt(one)
    return ()


def aborted(engine: FakeEngine, one: Any) -> tuple[Any, ...]:
    assert engine.finish(one, is_complete=False)[0] is False, "its blocks are free at once"
    assert ask(engine).unknown, "before the next step"
    return ()


def released(engine: FakeEngine, one: Any) -> tuple[Any, ...]:
    assert ask(engine).grant.tokens == 40
    assert engine.channel.tickets.release(9, [ticket("t")]) == ["a"]
    return (LeaseClaims(["a"], released=True),)


def reset(engine: FakeEngine, one: Any) -> tuple[Any, ...]:
    engine.producer.reset()
    return ()


@pytest.mark.parametrize("how", [preempted, aborted, released, reset])
def test_the_word_is_raised_before_a_step_that_may_overwrite_the_blocks(how) -> None:
    engine = start()
    one = arrive(engine)
    engine.step((one, 40))
    engine.begin((one, 20))  # in flight
    slot = ask(engine, consumer=8).grant.slot if how is not released else 0
    engine.half.messages.extend(how(engine, one))
    orders = engine.begin()
    assert (orders.raised, orders.ended) == ({"a": slot}, {})
    engine.half.step_done()
    assert isinstance(ask(engine), NotRedeemed), "not even by the step that was in flight"
    assert len(events_of(engine, LeaseEnded)) == 1
    if how is not aborted:
        one.num_computed_tokens = 0
        engine.step((one, 40))
        assert isinstance(ask(engine), NotRedeemed)
        assert engine.finish(one) == (False, write_nothing())
    for left in (1, 1, 0):
        assert engine.producer.leases == left, "the word is used again once all workers have raised it"
        confirm(engine, "a")
    assert not any(engine.producer.agenda)


def test_a_request_preempted_before_its_first_step_was_done_is_streamed_anew() -> None:
    engine = start()
    one = arrive(engine)
    engine.begin((one, 40))
    engine.preempt(one)
    engine.begin((one, 20))
    engine.half.step_done()
    assert ask(engine).unknown, "its blocks were taken while they were computed"
    engine.half.step_done()
    assert ask(engine).grant.tokens == 20


def test_a_ticket_of_another_prompt_is_not_published_again() -> None:
    engine = start()
    first = arrive(engine, "a")
    engine.step((first, 40))
    other = list(range(200, 200 + TOKENS))
    second = arrive(engine, "b", prompt_token_ids=other, all_token_ids=other)
    engine.step((second, 50))
    assert ask(engine).grant.tokens == 40
    assert ask(engine, tokens=other).reason.startswith("the offered blocks hold other")
    _, params = engine.finish(second)
    assert params["remote_request_id"] != ticket("t").hex()
    assert engine.finish(first)[1]["remote_request_id"] == ticket("t").hex()


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        ({"speculates": True}, {}),
        ({"writes_before_hooks": True}, {}),
        ({}, {"host_buffer": True}),
        ({"parent_of": lambda name: name[:1]}, {}),
        ({}, {"groups": (SLIDING,)}),
    ],
    ids=["drafts", "early writes", "host buffer", "samples", "windows alone"],
)
def test_tokens_that_a_step_does_not_make_final_are_readable_at_the_end_only(facts, settings) -> None:
    engine = start(facts=facts, **settings)
    one = arrive(engine)
    engine.step((one, 40))
    assert ask(engine).unknown
    engine.begin((one, 60))
    hold, params = engine.finish(one)
    assert hold
    assert (params["remote_step_tokens"] == 0) == ("parent_of" not in facts)


def test_blocks_that_another_connector_fills_are_not_readable_before_the_end() -> None:
    engine = start()
    one = arrive(engine)
    engine.cover(one, 40)
    for table in engine.tables["a"]:
        engine.drop(table, 3)
    engine.step((one, 40))
    assert ask(engine).unknown


def test_an_engine_that_offers_no_more_begins_no_stream() -> None:
    engine = start()
    one = arrive(engine)
    engine.begin((one, 40))
    engine.producer.stop_offering()
    engine.half.step_done()
    engine.step((arrive(engine, "b", "u"), 40))
    assert ask(engine).unknown
    assert ask(engine, of="u").unknown
    assert engine.finish(one)[0] is False


@pytest.mark.parametrize("how", ["drain", "stop_offering", "on_sleep"])
def test_a_readable_prompt_that_ends_in_an_engine_that_offers_no_more_has_its_word_raised(how) -> None:
    engine = start()
    one = arrive(engine)
    engine.step((one, 40))
    slot = ask(engine).grant.slot
    getattr(engine.producer, how)()
    assert engine.finish(one)[0] is False, "its blocks are free at once"
    assert ask(engine).unknown
    orders = engine.begin()
    assert (orders.raised, orders.ended) == ({"a": slot}, {})


def test_heartbeats_of_a_reader_reach_the_lease_of_a_prompt_that_is_computed() -> None:
    engine = start()
    one = arrive(engine)
    engine.step((one, 40))
    ask(engine)
    assert engine.channel.tickets.claimed(9, [ticket("t")]) == ["a"]
    assert hear(engine, LeaseClaims(["a"])) == NOTHING_TO_DO


@pytest.mark.parametrize("given", [None, "", "x" * 32, "0" * 31, 7, ["0" * 32]])
def test_a_malformed_ticket_is_ignored(given) -> None:
    engine = start()
    one = arrive(engine, kv_transfer_params={"do_remote_decode": True, "remote_request_id": given})
    engine.step((one, 40))
    assert len(engine.channel.tickets) == 0
    assert engine.finish(one)[0]
