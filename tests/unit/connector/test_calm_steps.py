"""Steps without work for the scheduler half: it looks at its parts only if something has happened."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import CacheGroup, EngineFacts, PlainRequest, PlainStep
from kvferry.connector.messages import StepOrders, StepReports, WorkerInfo
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.geometry import GroupKind
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.control_server import LeaseClaims
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Claim, Facts, RankCard, encode
from kvferry.transport.read_plan import Report
from kvferry.transport.redeem import Grant, PromptContent, Redeem
from support.block_pool import BlockPool
from support.clock import Clock
from support.models import attention, model
from transport.cards import ticket

BLOCK, PROMPT = 16, 40
ASKS = {"do_remote_decode": True}
CONTENT = PromptContent("tokens")


@contextmanager
def started(
    clock: Callable[[], float] = time.monotonic,
    *,
    lockstep: bool = False,
    wake: Callable[[], None] = lambda: None,
    **settings,
) -> Iterator[SchedulerHalf]:
    facts = EngineFacts(
        engine_id="e",
        groups=(CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=BLOCK),),
        num_blocks=100,
        longest_request=1000,
        steps_in_flight=2,
        tokens_in_flight=200,
        step_tokens=100,
        lockstep=lockstep,
    )
    config = ConnectorConfig(host="127.0.0.1", **settings)
    (rank,) = lay_out(model(attention()), EngineShape(1, (1,), BLOCK, "LBHNC", 100))
    card = RankCard(rank, b"", 4096, 64, 1)
    half = SchedulerHalf(
        facts,
        config,
        [WorkerInfo(geometry=rank, card=card)],
        BlockPool(100),
        facts=lambda incarnation: Facts("e", incarnation, "test", {}),
        namespace=lambda _: None,
        wake=wake,
        clock=clock,
    )
    try:
        yield half
    finally:
        half.shutdown()


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    with started() as one:
        yield one


def ask(name: str, **params) -> PlainRequest:
    return PlainRequest(
        request_id=name, prompt_token_ids=list(range(PROMPT)), kv_transfer_params=params or None
    )


def step(half: SchedulerHalf, tokens: dict[str, int] | None = None) -> StepOrders:
    tokens = {"r": 1} if tokens is None else tokens
    return half.orders(PlainStep(tokens=tokens, tables={name: ([1, 2, 3],) for name in tokens}))


def calm(half: SchedulerHalf) -> StepOrders:
    """Run two steps, of which the second is quiet."""
    step(half)
    orders = step(half)
    assert orders.quiet
    return orders


def test_quiet_steps_share_one_message(half):
    first = calm(half)
    assert step(half) is first
    assert replace(first, quiet=False) == StepOrders(computes=True)


def test_a_step_without_tokens_is_not_quiet_and_may_be_idle(half):
    calm(half)
    for _ in range(2):
        half.step_done()
    half.step_done()
    orders = step(half, {})
    assert (orders.quiet, orders.idle) == (False, True)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_step_may_wait_for_loads_if_nothing_computes_and_no_other_engine_waits_for_it(lockstep):
    with started(lockstep=lockstep) as half:
        assert step(half, {}).idle == (not lockstep)
        half.step_done()
        assert not step(half, {"a": 5}).idle
        assert not step(half, {}).idle, "the step before still computes"
        half.step_done()
        half.step_done()
        assert step(half, {}).idle == (not lockstep)


def test_an_engine_that_computes_nothing_goes_on_at_once_after_a_report():
    """It may then compute the request that was loaded, or load more."""
    woken = []
    with started(wake=lambda: woken.append(True)) as half:
        ended = StepReports(reports={"load": Report(None)})
        for tokens, reports, wakes in ({}, StepReports(), 0), ({"a": 5}, ended, 0), ({}, ended, 1):
            step(half, tokens)
            half.take_reports(reports)
            half.step_done()
            assert len(woken) == wakes


def test_orders_of_an_idle_engine_say_how_long_its_steps_take():
    clock = Clock()
    with started(clock) as half:
        for tokens, seconds, known in (0, 0.0, 0.0), (5, 0.02, 0.02), (5, 0.03, 0.03), (200, 9.0, 0.03):
            step(half, {"a": tokens} if tokens else {})
            clock.now += seconds
            half.step_done()
            assert step(half, {}).step_seconds == pytest.approx(known)
            half.step_done()


def finish(half: SchedulerHalf) -> None:
    one = ask("r")
    half.on_new_request(one)
    half.finished(one, ([1],))


def wait_for_free_blocks(half: SchedulerHalf) -> None:
    half.admission.matched(ask("r"), 0)


@pytest.mark.parametrize(
    "happen",
    [
        lambda half: half.on_new_request(ask("new")),
        lambda half: half.admission.allocated(ask("new"), (), 0),
        lambda half: half._peering.server.events.put(b"", LeaseClaims(["x"])),
    ],
    ids=["new request", "blocks", "message"],
)
def test_after_anything_that_needs_orders_the_next_step_is_not_quiet(half, happen):
    calm(half)
    happen(half)
    assert not step(half).quiet


@pytest.mark.parametrize(
    "happen",
    [
        finish,
        wait_for_free_blocks,
        lambda half: half.take_reports(StepReports()),
        lambda half: half.sent({"x"}),
    ],
    ids=["end", "a request that waits", "reports", "sent"],
)
def test_what_leaves_nothing_to_do_leaves_the_next_step_quiet(half, happen):
    calm(half)
    happen(half)
    assert step(half).quiet


def test_a_step_is_not_quiet_if_the_last_look_was_a_while_ago():
    clock = Clock()
    with started(clock) as half:
        calm(half)
        clock.now += 0.9
        assert step(half).quiet
        clock.now += 0.2
        assert not step(half).quiet


def test_after_a_reset_quiet_steps_are_of_the_new_epoch(half):
    calm(half)
    half.reset()
    assert calm(half).epoch == 1


def test_no_step_is_quiet_while_a_lease_is_held(half):
    one = ask("r", **ASKS)
    half.on_new_request(one)
    one.num_computed_tokens, one.is_complete = PROMPT, True
    held, _ = half.finished(one, ([1, 2, 3],))
    assert held
    assert not any(step(half).quiet for _ in range(3))
    half._peering.server.events.put(b"", LeaseClaims(["r"], released=True))
    assert set(step(half).ended) == {"r"}
    assert not step(half).quiet, "workers have not raised the word yet"
    half.sent({"r"})
    calm(half)


def test_an_engine_without_requests_rests_until_a_lease_ends_or_a_message_arrives():
    clock = Clock()
    with started(clock, lease_seconds=30) as half:
        assert half.rest_seconds == math.inf
        one = ask("r", **ASKS)
        half.on_new_request(one)
        assert half.rest_seconds == 0, "the request's events wait for its step"
        one.num_computed_tokens, one.is_complete = PROMPT, True
        half.finished(one, ([1, 2, 3],))
        clock.now += 10
        step(half, {})
        assert half.rest_seconds == 20
        half.on_pause(paused=True)
        assert half.rest_seconds == 0, "it ends leases that nobody claims within a second"
        half.on_pause(paused=False)
        half._peering.server.events.put(b"", LeaseClaims(["r"], released=True))
        assert set(step(half, {}).ended) == {"r"}
        assert half.rest_seconds == 0, "workers have not raised the word yet"
        half.sent({"r"})
        assert half.rest_seconds >= 20


def test_claims_and_releases_of_a_peer_make_the_engine_run_a_step():
    woken = []
    with started(wake=lambda: woken.append(True)) as half:
        server, name = half._peering.server, ticket("t")
        server.tickets.publish(name, "r", 4, CONTENT, Grant.of(LeaseWord(1, 2, 1), 4, [[5]]))
        for message, wakes in (
            (Redeem(1, 7, name, 4, CONTENT), 1),
            (Claim(consumer=7, tickets=[name], released=True), 2),
            (Claim(consumer=7, tickets=[name], released=True), 2),
        ):
            server._serve(b"peer", encode(message))
            assert len(woken) == wakes


def test_with_a_host_buffer_each_step_may_complete_a_prompt():
    with started(host_buffer=True) as one:
        assert not any(step(one).quiet for _ in range(3))


class Requests:
    """Requests that come and go, drawn at random."""

    def __init__(self, seed: int):
        self.draw, self.running, self.held = random.Random(seed), {}, set()

    def change(self, half: SchedulerHalf, number: int) -> None:
        what = self.draw.random()
        if what < 0.1:
            name = f"r{number}"
            params = self.draw.choice([{}, ASKS, {**ASKS, "remote_request_id": f"{number:032x}"}])
            self.running[name] = ask(name, **params)
            half.on_new_request(self.running[name])
        elif what < 0.2 and self.running:
            name = self.draw.choice(sorted(self.running))
            one = self.running.pop(name)
            one.is_complete = True
            if half.finished(one, ([1, 2, 3],))[0]:
                self.held.add(name)
        elif what < 0.5 and self.held:
            released = self.draw.choice([False, True, True])
            leases = [self.draw.choice(sorted(self.held))]
            half._peering.server.events.put(b"", LeaseClaims(leases, released))
        elif what > 0.98:
            half.reset()


def run(half: SchedulerHalf, seed: int, *, look: bool = False) -> list[StepOrders]:
    """Run an engine with two steps in flight; return the orders of all steps. With `look`, none is quiet."""
    requests, found = Requests(seed), []
    running = requests.running
    for number in range(150):
        requests.change(half, number)
        tokens = {name: 1 + 9 * (one.num_computed_tokens < PROMPT) for name, one in running.items()}
        if look:
            half._look_at = 0.0
        found.append(step(half, tokens))
        for name, count in tokens.items():
            one = running[name]
            one.num_computed_tokens += count
            if one.num_computed_tokens >= PROMPT:
                one.answer_token_ids.append(7)
        if ended := set(found[-1].ended):
            half.sent(ended)
            requests.held -= ended
        if number:
            half.step_done()
    return found


def test_quiet_steps_change_no_orders():
    quiet = 0
    for seed in range(12):
        with started() as one:
            found = run(one, seed)
            now = one.events.waiting, *one.admission.agenda, *one._peering.agenda
            assert [*map(id, one._agenda)] == [*map(id, now)], "a part has replaced its container"
        with started() as other:
            looked = run(other, seed, look=True)
        assert not any(orders.quiet for orders in looked)
        # The times of steps differ between the two runs.
        assert [replace(orders, quiet=False, step_seconds=0.0) for orders in found] == [
            replace(orders, step_seconds=0.0) for orders in looked
        ]
        quiet += sum(orders.quiet for orders in found)
    assert quiet > 100


def test_a_paused_engine_keeps_no_unclaimed_lease():
    clock = Clock()
    with started(clock) as half:
        one = ask("r", **ASKS)
        half.on_new_request(one)
        one.num_computed_tokens, one.is_complete = PROMPT, True
        assert half.finished(one, ([1, 2, 3],))[0]
        clock.now += 2
        assert not step(half).ended
        half.on_pause(paused=True)
        assert set(step(half).ended) == {"r"}


@pytest.fixture
def caught_up(half, monkeypatch) -> Iterator[list[str]]:
    """Let an event and a message to a peer wait. Return a list that grows as they are passed on."""
    client, done = half._peering.client, list[str]()
    monkeypatch.setattr(client, "flush", lambda: done.append("message"))
    half.events.subscribe(lambda event: done.append("event"))
    client.unsent.append((("127.0.0.1", 1), None))
    half.on_new_request(ask("new"))
    assert not done
    yield done
    client.unsent.clear()


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_events_and_messages_wait_while_a_request_waits_for_its_first_token(
    half, monkeypatch, caught_up, computed, loads, started
):
    def schedule(requests, orders):
        orders.loads.extend([None] * loads)
        return {"r"} if started else set()

    monkeypatch.setattr(half.admission, "schedule", schedule)
    step(half, {"r": 1} if computed else {})
    assert caught_up == ([] if loads or started else ["event", "message"])


def test_events_and_messages_wait_for_two_steps_at_most(half, monkeypatch, caught_up):
    monkeypatch.setattr(half.admission, "schedule", lambda requests, orders: {"r"})
    waited = []
    for _ in range(6):
        caught_up.clear()
        step(half)
        waited.append("message" not in caught_up)
    assert waited == [True, True, False] * 2


def test_no_event_waits_when_a_request_has_ended(half, caught_up):
    """No step may follow in which it could be passed on."""
    one = ask("new")
    half.finished(one, ([1],))
    assert caught_up == ["event"] * 2


def test_no_event_waits_when_the_engine_ends(half, caught_up):
    half._peering.client.unsent.clear()
    half.shutdown()
    assert caught_up == ["event"]


def test_an_engine_runs_another_step_for_messages_that_wait(half, caught_up):
    assert half.busy
    half._peering.client.unsent.clear()
    assert not half.busy
