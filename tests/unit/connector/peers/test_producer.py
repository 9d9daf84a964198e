"""Leases of a producer, as they are told."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.adapters import Adapters
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.events import LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.connector.messages import StepOrders
from kvferry.connector.peers import producer
from kvferry.connector.peers.offer import Offer, read_offer, write_nothing, write_offer
from kvferry.connector.peers.producer import Producer
from kvferry.connector.peers.turn_names import TurnNames
from kvferry.connector.prompt_content import content_of
from kvferry.connector.stream import EventStream
from kvferry.engines.vllm.compat.request_ids import parent_of
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.transport.control_server import LeasesClaimed, LeasesReleased
from kvferry.transport.redeem import NotRedeemed, Redeem, Redeemed
from kvferry.transport.tickets import TicketBook
from kvferry.transport.turns import TurnIndex
from support.block_pool import BlockPool, request
from support.clock import Clock
from support.engine_info import made_up
from support.lora import adapter, settled
from support.mm import feature

SECONDS = 30.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(producer.time, "monotonic", clock := Clock())
    return clock


class Pool(BlockPool):
    """All of it is in use."""

    def __init__(self) -> None:
        super().__init__(100)
        self.allocate(99)

        self.free_blocks_said = 1000

    def get_num_free_blocks(self) -> int:
        return self.free_blocks_said


def server(port: int = 7) -> SimpleNamespace:
    """What a producer needs of its control channel."""
    return SimpleNamespace(port=port, tickets=TicketBook(1), turns=TurnIndex())


class Engine:
    def __init__(self, **settings) -> None:
        self.told, self.fold = [], MetricsListener()
        self.producer = Producer(
            made_up(parent_of=parent_of),
            ConnectorConfig(lease_seconds=SECONDS, **settings),
            incarnation=1,
            events=EventStream(self.told.append, self.fold),
            names=TurnNames(Adapters()),
            adapters=Adapters(),
        )
        self.producer.port = 7

    def end(self, name: str, blocks: int = 1, tokens: int = 8, **more) -> tuple:
        """A request comes in for another engine, and ends; what is said of it."""
        one = request(name, range(tokens), **{"trim_prompt": lambda: True, "is_complete": True, **more})
        one.kv_transfer_params = {"do_remote_decode": True}
        self.producer.on_new_request(one)
        return self.producer.finished(one, ([0, *range(1, 1 + blocks)],))

    def offer(self, name: str, blocks: int = 1) -> None:
        assert self.end(name, blocks)[0]

    def hear(self, *events: LeasesClaimed | LeasesReleased, turns: bool = False) -> dict[str, int]:
        meta = StepOrders()
        self.producer.take_events(deque(events), meta)
        assert not (meta.ended if turns else meta.raised)
        return meta.raised if turns else meta.ended


def test_a_lease_is_told_from_its_grant_to_its_end(clock) -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.offer(name)
    assert engine.told == [LeaseGranted(name, clock.now, 8, SECONDS) for name in ("a", "b")]
    clock.now += SECONDS / 2
    engine.hear(LeasesClaimed(["a", "nobody"]))
    assert engine.told[2:] == [LeaseExtended("a", clock.now)]
    clock.now += SECONDS / 2
    assert engine.hear().keys() == {"b"}
    assert engine.told[3:] == [LeaseEnded("b", clock.now, expired=True)]
    assert engine.hear(LeasesReleased(["a", "b"])).keys() == {"a"}
    assert engine.told[4:] == [LeaseEnded("a", clock.now, expired=False)]
    counted = engine.fold.take()
    assert {" ".join([name, *of]): n for (name, of), n in counted.counters.items()} == {
        "leases_granted": 2, "leases_ended expired": 1, "leases_ended released": 1,
    }  # fmt: skip
    assert counted.gauges == {("leases", ()): 0}


def waits_for(tokens: int) -> object:
    """A request that has no blocks yet."""
    return request(f"of {tokens}", range(tokens), status=RequestStatus.WAITING)


def test_a_lease_that_nobody_claims_gives_way_to_a_request_that_waits_for_blocks(clock) -> None:
    """Its client has left, or the decode engine refuses the request: nobody will ever read it."""
    engine, pool = Engine(), Pool()
    engine.producer.start(server(), pool, 1)
    for name in "abcd":
        engine.offer(name, blocks=4)
    engine.hear(LeasesClaimed(["b"]))
    pool.free_blocks_said = 5
    engine.producer.on_new_request(waits := waits_for(8 * 16))  # nine blocks, four more than there are
    clock.now += SECONDS / 4 - 0.01
    assert engine.hear() == {}, "they may still be on their way"
    clock.now += 0.01
    assert engine.hear().keys() == {"a"}, "the oldest, and no more than needed"
    assert engine.told[-1] == LeaseEnded("a", clock.now, expired=True)
    assert engine.hear() == {}, "its blocks are coming"
    engine.producer.sent({"a"})
    assert engine.hear().keys() == {"c"}, "they came to nothing: other requests hold them too"
    engine.producer.sent({"c"})
    pool.free_blocks_said = 9
    assert engine.hear() == {}
    pool.free_blocks_said = 0
    waits.status = RequestStatus.RUNNING
    assert engine.hear() == {}, "nobody waits"
    waits.status = RequestStatus.PREEMPTED
    assert engine.hear().keys() == {"d"}, "and never the one that was claimed"
    engine.producer.sent({"d"})
    engine.producer.finished(waits, ([],))
    assert engine.hear() == {}
    assert not engine.producer._unclaimed._blocks.keys() - {"b"}
    assert not engine.producer._unclaimed._leaving


def test_a_prompt_of_which_one_token_is_left_is_offered(clock) -> None:
    assert Engine().end("a", tokens=1)[1]["remote_num_tokens"] == 1


def redeem(engine: Engine, params: dict, content, consumer: int = 9) -> Redeemed | NotRedeemed:
    """What another engine gets for a ticket."""
    offer = read_offer(params)
    return engine.producer._tickets.redeem(
        Redeem(0, consumer, offer.ticket, offer.remote_num_tokens, content)
    )


def test_only_requests_that_another_engine_asks_for_stop_short_of_their_last_token() -> None:
    cut = []
    engine = Engine()
    for name, params in ("a", None), ("b", {"do_remote_prefill": True}), ("c", {"do_remote_decode": True}):
        one = request(name, range(8), trim_prompt=lambda name=name: cut.append(name))
        one.kv_transfer_params = params
        engine.producer.on_new_request(one)
    assert cut == ["c"]


def test_a_prompt_is_completed_by_the_step_that_computes_the_last_of_it(clock) -> None:
    engine = Engine()
    one = request("a", range(8), trim_prompt=lambda: True)
    one.kv_transfer_params = {"do_remote_decode": True}
    engine.producer.on_new_request(one)
    found = []
    for computed, scheduled in ((0, 4), (4, 3), (4, 4), (4, 5), (7, 1), (8, 1)):
        one.num_computed_tokens = computed
        found.append(engine.producer.completed_by({"a": scheduled, "b": 1}) == [one])
    assert found == [False, False, True, True, True, False]
    one.num_computed_tokens = 4
    assert engine.producer.completed_by({"b": 4}) == []


def test_a_ticket_is_exchanged_for_the_blocks_of_a_prompt_computed_from_the_same(clock, tmp_path) -> None:
    engine, lora = Engine(), adapter(tmp_path)
    name = settled(lambda: engine.producer._adapters.name(lora))
    one = {"mm_features": [feature(1, [1.0, 2.0])], "lora_request": lora, "cache_salt": "mine"}
    params, plain = (engine.end(name, blocks=2, **more)[1] for name, more in (("a", one), ("b", {})))
    content = content_of(request("a", range(8), **one), 8, engine.producer._adapters)
    assert (content.adapter, bool(content.items), bool(content.salt)) == (name, True, True)
    answer = redeem(engine, params, content)
    assert (answer.incarnation, answer.grant.word(1).slot) == (1, 0)
    assert [ids.tolist() for ids in answer.grant.block_ids] == [[0, 1, 2]]
    for without in one:
        other = content_of(request("a", range(8), **{**one, without: None}), 8, engine.producer._adapters)
        assert isinstance(redeem(engine, params, other), NotRedeemed), without
    assert isinstance(redeem(engine, plain, content), NotRedeemed)


def test_what_passes_through_users_names_no_block_no_memory_and_no_request(clock) -> None:
    engine = Engine()
    one, other = (engine.end(name)[1] for name in ("a", "b"))
    assert one.keys() == write_offer(Offer("e", "h", 1, "0" * 32, 1, 1)).keys()
    assert one["remote_request_id"] != other["remote_request_id"]
    assert {**one, "remote_request_id": ""} == {**other, "remote_request_id": ""}


@pytest.mark.parametrize("how", ["released", "expired", "withdrawn"])
def test_a_ticket_ends_before_a_word_of_its_lease_is_raised(clock, how) -> None:
    engine = Engine()
    params = engine.end("a")[1]
    content = content_of(request("a", range(8)), 8, Adapters())
    assert isinstance(redeem(engine, params, content), Redeemed)
    if how == "expired":
        clock.now += SECONDS
    elif how == "withdrawn":
        engine.producer.reset()
        assert isinstance(redeem(engine, params, content), NotRedeemed), "even before the next step"
    ended = engine.hear(*([LeasesReleased(["a"])] if how == "released" else []))
    assert ended.keys() == {"a"}, "workers raise the word after this"
    assert isinstance(redeem(engine, params, content, consumer=10), NotRedeemed)


def test_what_no_lease_is_left_for_is_not_offered(clock, monkeypatch, caplog) -> None:
    monkeypatch.setattr(producer, "LEASE_SLOTS", 1)
    engine = Engine()
    engine.offer("a")
    assert engine.end("b") == (False, write_nothing())
    assert "request b: not offered" in caplog.text
    engine.hear(LeasesReleased(["a"]))
    assert engine.end("c") == (False, write_nothing()), "not before all workers have raised the word"
    engine.producer.sent({"a"})
    engine.offer("d")


def test_what_has_no_certain_name_is_not_offered_and_takes_no_lease(clock, caplog) -> None:
    engine = Engine()
    assert engine.end("a", mm_features=[feature(1, None)]) == (False, write_nothing())
    assert "request a: not offered" in caplog.text
    assert engine.producer._book.held == []


SAMPLES = [f"{number}_cmpl-1-0-12ab34cd" for number in range(3)]


def test_samples_of_one_prompt_share_a_lease(clock) -> None:
    """The response carries the offer of one of them, whichever: the others' would be claimed by nobody."""
    engine = Engine()
    keeps, offer = engine.end(SAMPLES[0])
    assert keeps
    assert engine.end(SAMPLES[1]) == engine.end(SAMPLES[2]) == (False, offer), (
        "their own blocks are given back"
    )
    assert engine.end("0_cmpl-1-0-12ab34ce")[1] != offer
    assert [event.request_id for event in engine.told] == [SAMPLES[0], "0_cmpl-1-0-12ab34ce"]
    assert engine.hear(LeasesReleased([SAMPLES[0]])).keys() == {SAMPLES[0]}
    assert engine.end(SAMPLES[1])[0], "of a lease that has ended nothing can be read any more"
    clock.now += SECONDS
    assert engine.hear().keys() == {"0_cmpl-1-0-12ab34ce", SAMPLES[1]}
    assert len(engine.producer._siblings) == 0


def test_requests_that_are_no_samples_of_one_prompt_share_nothing(clock) -> None:
    engine = Engine()
    names = ("0_a", "1_a", "cmpl-1-0-12ab34cd", "cmpl-2-0-12ab34cd", "x_cmpl-1-0-12ab34cd")
    assert len({engine.end(name)[1]["remote_request_id"] for name in names}) == len(names)
    assert len(engine.producer._siblings) == 0


def test_a_lease_is_withdrawn_when_another_sample_is_aborted(clock) -> None:
    engine = Engine()
    assert engine.end(SAMPLES[0])[0]
    assert engine.end(SAMPLES[1], is_complete=False) == (False, write_nothing())
    assert engine.hear().keys() == {SAMPLES[0]}
    assert engine.told[-1] == LeaseEnded(SAMPLES[0], clock.now, expired=False, withdrawn=True)
    assert engine.end(SAMPLES[2], is_complete=False) == (False, write_nothing())
    assert engine.hear() == {}


def test_an_earlier_turn_is_kept_for_its_time(clock) -> None:
    engine, channel = Engine(turn_seconds=4 * SECONDS), server()
    engine.producer.start(channel, pool := Pool(), 1)
    assert engine.producer.keeps_turns == ("127.0.0.1", 7)
    one = request("a", range(300), num_computed_tokens=299)
    assert engine.producer.finished(one, (list(range(1, 20)),)) == (False, None), "the engine is done with it"
    assert pool.references == 99 + 19
    assert engine.hear() == engine.hear() == {}
    assert (len(channel.turns), len(channel.tickets)) == (1, 0)
    clock.now += 3.5 * SECONDS
    engine.hear(LeasesClaimed(["a"]))
    clock.now += 0.9 * SECONDS
    assert engine.hear() == {}, "it is being read"
    clock.now += 0.1 * SECONDS
    assert engine.hear(turns=True).keys() == {"a"}
    assert len(channel.turns) == 0
    assert engine.told[-1] == LeaseEnded("a", clock.now, expired=False)
    assert engine.producer.holds_blocks
    engine.producer.on_workers_confirmed({"a": 1})
    assert (pool.references, len(engine.producer._book)) == (99, 0)
    assert not engine.producer.busy


def test_an_earlier_turn_of_one_of_several_samples_ends_like_any_other(clock) -> None:
    engine = Engine(turn_seconds=SECONDS)
    engine.producer.start(server(), Pool(), 1)
    engine.producer.finished(request(SAMPLES[0], range(300), num_computed_tokens=299), (list(range(1, 20)),))
    clock.now += SECONDS
    assert engine.hear(turns=True).keys() == {SAMPLES[0]}


def test_a_reset_gives_earlier_turns_back(clock) -> None:
    engine = Engine(turn_seconds=SECONDS)
    engine.producer.start(server(), Pool(), 1)
    engine.producer.finished(request("a", range(300), num_computed_tokens=299), (list(range(1, 20)),))
    engine.producer.reset()
    assert engine.hear(turns=True).keys() == {"a"}


def test_a_reset_withdraws_what_was_offered_before(clock) -> None:
    engine = Engine()
    engine.offer("a")
    engine.producer.reset()
    engine.offer("b")
    assert engine.hear().keys() == {"a"}
    assert engine.told[-1] == LeaseEnded("a", clock.now, expired=False, withdrawn=True)
    assert engine.hear(LeasesReleased(["a"])) == {}
    assert engine.hear(LeasesReleased(["b"])).keys() == {"b"}


def test_an_engine_that_has_left_offers_and_keeps_nothing_more(clock) -> None:
    engine = Engine(turn_seconds=SECONDS)
    engine.producer.start(server(), pool := Pool(), 1)
    engine.offer("a")
    engine.producer.stop_offering()
    assert engine.end("b") == (False, write_nothing())
    assert engine.hear().keys() == {"a"}
    one = request("c", range(300), num_computed_tokens=299)
    assert engine.producer.finished(one, (list(range(1, 20)),)) == (False, None)
    assert not engine.producer.busy
    assert pool.references == 99, "no turn is kept"


def test_a_drained_engine_offers_nothing_more_and_keeps_the_leases_that_are_held(clock) -> None:
    engine = Engine(turn_seconds=SECONDS)
    engine.producer.start(server(), Pool(), 1)
    engine.offer("a")
    engine.producer.drain()
    assert engine.end("b") == (False, write_nothing())
    assert engine.hear() == {}
    assert engine.producer.leases == 1
    assert engine.hear(LeasesReleased(["a"])).keys() == {"a"}
    engine.producer.sent({"a"})
    assert engine.producer.leases == 0


def test_without_the_setting_nothing_is_kept(clock) -> None:
    engine = Engine()
    assert engine.producer.keeps_turns is None
    one = request("a", range(300), num_computed_tokens=299)
    assert engine.producer.finished(one, (list(range(1, 20)),)) == (False, None)
