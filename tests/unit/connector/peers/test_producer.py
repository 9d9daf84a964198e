"""Leases of a producer: their offers, their end, and the turns that it keeps."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from kvferry.common.errors import ProtocolError
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.events import LeaseEnded, LeaseExtended, LeaseGranted
from kvferry.engines.vllm.compat.requests import parent_of
from kvferry.transport import seal
from kvferry.transport.control_server import LeaseClaims
from kvferry.transport.offer import MAX_UNWANTED, Offer, read_offer, write_nothing, write_offer
from kvferry.transport.redeem import Grant, NotRedeemed, Redeem, Redeemed
from kvferry.transport.seal import SealBinding, open_seal
from support.block_pool import request
from support.fake_engine import FakeEngine
from support.lora import adapter, once_named
from support.mm import feature
from support.producers import LEASE_SECONDS, confirm, hear, producing

ASKS = {"do_remote_decode": True}
SAMPLES = [f"{number}_cmpl-1-0-12ab34cd" for number in range(3)]


def start(**settings) -> FakeEngine:
    return producing(facts={"parent_of": parent_of}, **settings)


def end(engine: FakeEngine, name: str, blocks: int = 1, tokens: int = 8, **more) -> tuple:
    """A request for another engine arrives and ends; return what the producer answers."""
    given = {"kv_transfer_params": ASKS, "trim_prompt": lambda: True, "is_complete": True, **more}
    one = engine.arrive(request(name, range(tokens), **given))
    assert engine.cover(one, blocks * 16)
    return engine.finish(one, is_complete=one.is_complete)


def offer(engine: FakeEngine, name: str, blocks: int = 1) -> None:
    assert end(engine, name, blocks)[0]


def keep_turn(engine: FakeEngine, name: str) -> tuple:
    """A request without an offer ends, whose KV may be kept for its next turn."""
    one = engine.arrive(request(name, range(300), num_computed_tokens=299))
    assert engine.cover(one, 300)
    return engine.finish(one)


def ended(engine: FakeEngine, *messages: LeaseClaims) -> set[str]:
    """Leases whose words workers raise with the next step."""
    orders = hear(engine, *messages)
    assert not orders.raised
    return set(orders.ended)


def ended_turns(engine: FakeEngine) -> set[str]:
    orders = hear(engine)
    assert not orders.ended
    return set(orders.raised)


def grant_of(engine: FakeEngine, name: str) -> LeaseGranted:
    """The only lease of a request."""
    (found,) = [one for one in engine.told if isinstance(one, LeaseGranted) and one.request_id == name]
    return found


def redeem(engine: FakeEngine, params: dict, content, consumer: int = 9) -> Redeemed | NotRedeemed:
    """What another engine gets for a ticket."""
    found = read_offer(params)
    asked = Redeem(0, consumer, bytes.fromhex(found.remote_request_id), found.remote_num_tokens, content)
    return engine.channel.tickets.redeem(asked)


def test_events_follow_a_lease_from_its_grant_to_its_end() -> None:
    engine = start()
    for name in ("a", "b"):
        offer(engine, name)
    first, second = [LeaseGranted(name, engine.clock.now, 8, LEASE_SECONDS) for name in ("a", "b")]
    assert engine.told == [first, second]
    engine.clock.now += LEASE_SECONDS / 2
    ended(engine, LeaseClaims(["a", "nobody"]))
    assert engine.told[2:] == [LeaseExtended("a", engine.clock.now)]
    engine.clock.now += LEASE_SECONDS / 2
    assert ended(engine) == {"b"}
    assert engine.told[3:] == [LeaseEnded("b", engine.clock.now, granted=second, expired=True)]
    assert ended(engine, LeaseClaims(["a", "b"], released=True)) == {"a"}
    assert engine.told[4:] == [LeaseEnded("a", engine.clock.now, granted=first, expired=False)]
    found = engine.fold.take()
    assert {" ".join([name, *of]): n for (name, of), n in found.counters.items()} == {
        "leases_granted": 2, "leases_ended expired": 1, "leases_ended released": 1,
    }  # fmt: skip
    assert found.gauges == {("leases", ()): 0}


def test_unclaimed_leases_end_early_when_a_request_waits_for_blocks() -> None:
    # Their client has left, or the decode engine refuses the request: no engine will read these blocks.
    engine = start(blocks=100)
    for name in "abcd":
        offer(engine, name, blocks=4)
    ended(engine, LeaseClaims(["b"]))
    engine.leave_free(5)
    # Nine blocks, four more than there are.
    waits = engine.arrive(request("waits", range(8 * 16), status=RequestStatus.WAITING))
    engine.clock.now += LEASE_SECONDS / 4 - 0.01
    assert ended(engine) == set(), "their consumers may still claim them"
    engine.clock.now += 0.01
    assert ended(engine) == {"a"}, "the oldest, and no more than needed"
    assert engine.told[-1] == LeaseEnded("a", engine.clock.now, granted=grant_of(engine, "a"), expired=True)
    assert ended(engine) == set(), "its blocks will soon be free"
    engine.sent("a")
    engine.leave_free(5)
    assert ended(engine) == {"c"}, "another request has taken the blocks"
    engine.sent("c")
    engine.leave_free(9)
    assert ended(engine) == set()
    engine.leave_free(0)
    waits.status = RequestStatus.RUNNING
    assert ended(engine) == set(), "no request waits"
    waits.status = RequestStatus.PREEMPTED
    assert ended(engine) == {"d"}, "the claimed lease goes on"
    engine.sent("d")
    engine.leave_free(0)
    engine.finish(waits)
    assert ended(engine) == set()


def test_null_blocks_of_an_unclaimed_lease_do_not_count() -> None:
    engine = start(blocks=100)
    for name in "ab":
        one = request(name, range(32), kv_transfer_params=ASKS, trim_prompt=lambda: True, is_complete=True)
        engine.arrive(one)
        engine.cover(one, 32)
        engine.drop(engine.tables[name][0], 1)
        assert engine.finish(one)[0]
    engine.leave_free(0)
    engine.arrive(request("waits", range(16), status=RequestStatus.WAITING))
    engine.clock.now += LEASE_SECONDS / 4
    assert ended(engine) == {"a", "b"}, "it needs two blocks, and each lease has one that is not null"


def named(number: int, *unwanted: int) -> dict:
    """What a router says: its name for the KV of this prompt, and the names that it no longer wants."""
    name, *others = (f"{one:032x}" for one in (number, *unwanted))
    return {**ASKS, "remote_name": name, "remote_unwanted": others}


def test_an_unclaimed_lease_ends_when_the_router_no_longer_wants_it() -> None:
    engine = start()
    for number, name in enumerate("abc"):
        assert end(engine, name, kv_transfer_params=named(number))[0]
    ended(engine, LeaseClaims(["b"]))
    assert end(engine, "d", kv_transfer_params=named(3, 0, 1, 99))[0]
    assert ended(engine) == {"a"}, "an engine reads b, which it releases by itself"
    assert engine.told[-1] == LeaseEnded(
        "a", engine.clock.now, granted=grant_of(engine, "a"), expired=False, withdrawn=True
    )
    engine.producer.on_new_request(request("own", [0], kv_transfer_params={"remote_unwanted": [f"{3:032x}"]}))
    assert ended(engine) == {"d"}, "any request may say it"
    assert end(engine, "e", kv_transfer_params={**named(4, 2), "remote_unwanted": ["c"]})[0]
    assert ended(engine) == set(), "nobody guesses a name"


def test_kv_that_is_no_longer_wanted_before_it_is_computed_is_kept_for_nobody() -> None:
    engine = start()
    offer(engine, "a")
    assert end(engine, "b", kv_transfer_params=named(2, 3))[0]
    assert end(engine, "c", kv_transfer_params=named(3))[0]
    assert ended(engine) == {"c"}


def test_prompts_are_offered_however_many_names_are_no_longer_wanted() -> None:
    engine = start()
    assert end(engine, "a", kv_transfer_params=named(1, *range(1000, 1000 + MAX_UNWANTED)))[0]
    assert end(engine, "b", kv_transfer_params=named(2, 2000, 2001))[0], "the oldest names are forgotten"
    assert not any(engine.producer.agenda[2:]), "no prompt is still computed"


def test_unclaimed_leases_end_soon_while_the_engine_is_paused() -> None:
    engine = start()
    for name in "ab":
        offer(engine, name)
    ended(engine, LeaseClaims(["b"]))
    engine.producer.on_pause(paused=True)
    assert ended(engine) == set(), "a decode engine may just be asking for it"
    engine.clock.now += 1
    assert ended(engine) == {"a"}
    engine.producer.on_pause(paused=False)
    offer(engine, "c")
    engine.clock.now += 1
    assert ended(engine) == set()


def test_no_turns_are_kept_while_the_engine_is_paused() -> None:
    engine = start(turn_seconds=600)
    keep_turn(engine, "a")
    engine.producer.on_pause(paused=True)
    assert ended_turns(engine) == {"a"}
    keep_turn(engine, "b")
    assert not len(engine.producer._book.held)
    engine.producer.on_pause(paused=False)
    keep_turn(engine, "c")
    assert engine.producer._book.held == ["c"]


def test_an_engine_that_falls_asleep_ends_its_leases_at_once_and_offers_nothing() -> None:
    engine = start()
    for name in "ab":
        offer(engine, name)
    ended(engine, LeaseClaims(["b"]))
    engine.producer.on_pause(paused=True)
    engine.producer.on_sleep()
    assert ended(engine) == {"a", "b"}
    assert end(engine, "c") == (False, write_nothing(stopped=True))
    engine.producer.on_pause(paused=False)
    offer(engine, "d")


def test_a_prompt_of_one_token_is_offered() -> None:
    assert end(start(), "a", tokens=1)[1]["remote_num_tokens"] == 1


def test_only_prompts_for_other_engines_lose_their_last_token() -> None:
    cut = []
    engine = start()
    for name, params in ("a", None), ("b", {"do_remote_prefill": True}), ("c", {"do_remote_decode": True}):
        one = request(name, range(8), trim_prompt=lambda name=name: cut.append(name))
        one.kv_transfer_params = params
        engine.producer.on_new_request(one)
    assert cut == ["c"]


def test_a_prompt_is_completed_by_the_step_that_computes_its_last_token() -> None:
    engine = start()
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


def test_a_ticket_is_exchanged_for_the_blocks_of_a_prompt_computed_from_the_same(tmp_path) -> None:
    engine, lora = start(), adapter(tmp_path)
    name = once_named(lambda: engine.adapters.name(lora))
    one = {"mm_features": [feature(1, [1.0, 2.0])], "lora_request": lora, "cache_salt": "mine"}
    params, plain = (end(engine, name, blocks=2, **more)[1] for name, more in (("a", one), ("b", {})))
    content = content_of(request("a", range(8), **one), 8, engine.adapters)
    assert (content.adapter, bool(content.items), bool(content.salt)) == (name, True, True)
    answer = redeem(engine, params, content)
    assert (answer.grant.incarnation, answer.grant.slot) == (1, 0)
    assert [ids.tolist() for ids in answer.grant.block_ids] == [[1, 2]]
    for without in one:
        other = content_of(request("a", range(8), **{**one, without: None}), 8, engine.adapters)
        assert isinstance(redeem(engine, params, other), NotRedeemed), without
    assert isinstance(redeem(engine, plain, content), NotRedeemed)


def test_an_offer_names_no_block_no_memory_and_no_request() -> None:
    engine = start()
    one, other = (end(engine, name)[1] for name in ("a", "b"))
    differ = {"remote_request_id": "", "remote_sealed_grant": ""}
    assert one.keys() == write_offer(Offer("e", "h", 1, "0" * 32, 1, 1)).keys() | differ.keys()
    assert all(one[key] != other[key] for key in differ)
    assert {**one, **differ} == {**other, **differ}


def opened(engine: FakeEngine, params: dict, content, host: str = "127.0.0.1") -> Grant:
    """What an engine of the same key, with such a prompt, finds in an offer."""
    found = read_offer(params)
    named, tokens = bytes.fromhex(found.remote_request_id), found.remote_num_tokens
    return open_seal(
        engine.channel.seal_key,
        found.remote_sealed_grant,
        SealBinding((host, found.remote_port), named, tokens, content),
    )


def test_an_offer_carries_the_answer_to_its_ticket_for_who_has_the_prompt() -> None:
    engine = start(advertise_host="engine.example")
    params = end(engine, "a", blocks=2)[1]
    content = content_of(request("a", range(8)), 8, Adapters())
    assert params["remote_host"] == "engine.example"
    assert opened(engine, params, content, "engine.example") == redeem(engine, params, content).grant
    for other in (range(1, 9), range(7)):
        with pytest.raises(ProtocolError, match="does not open"):
            opened(engine, params, content_of(request("a", other), 8, Adapters()), "engine.example")
    with pytest.raises(ProtocolError, match="does not open"):
        opened(engine, params, content)


def test_an_offer_of_scattered_blocks_carries_none(monkeypatch) -> None:
    monkeypatch.setattr(seal, "MAX_SEAL", 40)
    engine = start()
    params = end(engine, "a", blocks=2)[1]
    assert "remote_sealed_grant" not in params
    assert isinstance(redeem(engine, params, content_of(request("a", range(8)), 8, Adapters())), Redeemed)


def test_a_seal_outlives_its_lease_and_then_names_a_word_that_was_raised() -> None:
    engine = start()
    params = end(engine, "a")[1]
    content = content_of(request("a", range(8)), 8, Adapters())
    old = opened(engine, params, content)
    engine.producer.reset()
    assert ended(engine) == {"a"}, "workers raise the word before the blocks are freed"
    engine.producer.sent({"a"})
    again = opened(engine, end(engine, "b")[1], content)
    assert (again.slot, again.generation) == (old.slot, old.generation + 1)


@pytest.mark.parametrize("how", ["released", "expired", "withdrawn"])
def test_a_ticket_ends_before_a_word_of_its_lease_is_raised(how) -> None:
    engine = start()
    params = end(engine, "a")[1]
    content = content_of(request("a", range(8)), 8, Adapters())
    assert isinstance(redeem(engine, params, content), Redeemed)
    if how == "expired":
        engine.clock.now += LEASE_SECONDS
    elif how == "withdrawn":
        engine.producer.reset()
        assert isinstance(redeem(engine, params, content), NotRedeemed), "even before the next step"
    messages = [LeaseClaims(["a"], released=True)] if how == "released" else []
    assert ended(engine, *messages) == {"a"}, "workers raise the word after this"
    assert isinstance(redeem(engine, params, content, consumer=10), NotRedeemed)


def test_a_prompt_is_not_offered_when_all_lease_slots_are_in_use(caplog) -> None:
    engine = start(lease_slots=1)
    offer(engine, "a")
    assert end(engine, "b") == (False, write_nothing())
    assert "request b: not offered" in caplog.text
    ended(engine, LeaseClaims(["a"], released=True))
    assert end(engine, "c") == (False, write_nothing()), "not before all workers have raised the word"
    engine.sent("a")
    offer(engine, "d")


def test_an_unnameable_prompt_is_not_offered_and_takes_no_lease(caplog) -> None:
    engine = start()
    assert end(engine, "a", mm_features=[feature(1, None)]) == (False, write_nothing())
    assert "request a: not offered" in caplog.text
    assert engine.producer.leases == 0


def test_samples_of_one_prompt_share_a_lease() -> None:
    """The response carries the offer of one of them, whichever: the others' would be claimed by nobody."""
    engine = start()
    keeps, offer = end(engine, SAMPLES[0])
    assert keeps
    assert end(engine, SAMPLES[1]) == end(engine, SAMPLES[2]) == (False, offer), (
        "their own blocks are given back"
    )
    assert end(engine, "0_cmpl-1-0-12ab34ce")[1] != offer
    assert [event.request_id for event in engine.told] == [SAMPLES[0], "0_cmpl-1-0-12ab34ce"]
    assert ended(engine, LeaseClaims([SAMPLES[0]], released=True)) == {SAMPLES[0]}
    assert end(engine, SAMPLES[1])[0], "of a lease that has ended nothing can be read any more"
    engine.clock.now += LEASE_SECONDS
    assert ended(engine) == {"0_cmpl-1-0-12ab34ce", SAMPLES[1]}


def test_requests_of_different_prompts_share_no_lease() -> None:
    engine = start()
    names = ("0_a", "1_a", "cmpl-1-0-12ab34cd", "cmpl-2-0-12ab34cd", "x_cmpl-1-0-12ab34cd")
    assert len({end(engine, name)[1]["remote_request_id"] for name in names}) == len(names)


def test_a_lease_is_withdrawn_when_another_sample_is_aborted() -> None:
    engine = start()
    assert end(engine, SAMPLES[0])[0]
    assert end(engine, SAMPLES[1], is_complete=False) == (False, write_nothing())
    assert ended(engine) == {SAMPLES[0]}
    assert engine.told[-1] == LeaseEnded(
        SAMPLES[0], engine.clock.now, granted=grant_of(engine, SAMPLES[0]), expired=False, withdrawn=True
    )
    assert end(engine, SAMPLES[2], is_complete=False) == (False, write_nothing())
    assert ended(engine) == set()


def test_an_earlier_turn_is_kept_for_its_time() -> None:
    engine = start(turn_seconds=4 * LEASE_SECONDS)
    assert engine.producer.keeps_turns == ("127.0.0.1", 7)
    assert keep_turn(engine, "a") == (False, None), "the engine is done with it"
    assert engine.pool.references == 19
    assert ended(engine) == ended(engine) == set()
    assert (len(engine.channel.turns), len(engine.channel.tickets)) == (1, 0)
    engine.clock.now += 3.5 * LEASE_SECONDS
    ended(engine, LeaseClaims(["a"]))
    engine.clock.now += 0.9 * LEASE_SECONDS
    assert ended(engine) == set(), "it is being read"
    engine.clock.now += 0.1 * LEASE_SECONDS
    assert ended_turns(engine) == {"a"}
    assert len(engine.channel.turns) == 0
    assert engine.told[-1] == LeaseEnded("a", engine.clock.now, granted=grant_of(engine, "a"), expired=False)
    assert engine.producer.turns.holds_blocks
    confirm(engine, "a")
    assert (engine.pool.references, engine.producer.leases) == (0, 0)
    assert not engine.producer.turns.busy


def test_an_earlier_turn_of_one_of_several_samples_ends_like_any_other() -> None:
    engine = start(turn_seconds=LEASE_SECONDS)
    keep_turn(engine, SAMPLES[0])
    engine.clock.now += LEASE_SECONDS
    assert ended_turns(engine) == {SAMPLES[0]}


def test_a_reset_ends_the_leases_of_kept_turns() -> None:
    engine = start(turn_seconds=LEASE_SECONDS)
    keep_turn(engine, "a")
    engine.producer.reset()
    assert ended_turns(engine) == {"a"}


def test_a_reset_withdraws_earlier_offers() -> None:
    engine = start()
    offer(engine, "a")
    engine.producer.reset()
    offer(engine, "b")
    assert ended(engine) == {"a"}
    assert engine.told[-1] == LeaseEnded(
        "a", engine.clock.now, granted=grant_of(engine, "a"), expired=False, withdrawn=True
    )
    assert ended(engine, LeaseClaims(["a"], released=True)) == set()
    assert ended(engine, LeaseClaims(["b"], released=True)) == {"b"}


def test_an_engine_that_stopped_offering_keeps_no_turn_and_offers_no_prompt() -> None:
    engine = start(turn_seconds=LEASE_SECONDS)
    offer(engine, "a")
    engine.producer.stop_offering()
    assert end(engine, "b") == (False, write_nothing(stopped=True))
    assert ended(engine) == {"a"}
    assert keep_turn(engine, "c") == (False, None)
    assert not engine.producer.turns.busy
    assert engine.references == 1, "the leased block; no turn is kept"


def test_a_drained_engine_offers_nothing_more_and_keeps_the_leases_that_are_held() -> None:
    engine = start(turn_seconds=LEASE_SECONDS)
    offer(engine, "a")
    engine.producer.drain()
    assert end(engine, "b") == (False, write_nothing(stopped=True))
    assert ended(engine) == set()
    assert engine.producer.leases == 1
    assert ended(engine, LeaseClaims(["a"], released=True)) == {"a"}
    engine.sent("a")
    assert engine.producer.leases == 0


def test_no_turn_is_kept_unless_it_is_configured() -> None:
    engine = start()
    assert engine.producer.keeps_turns is None
    assert keep_turn(engine, "a") == (False, None)
