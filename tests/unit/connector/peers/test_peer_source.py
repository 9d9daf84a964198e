"""Another engine as a source: leases are released once, and failed peers are excluded."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from msgspec import structs
from vllm.v1.metrics.stats import PrefillStats

from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.blocks import Transfer, TransferBook
from kvferry.connector.content import Adapters, content_of
from kvferry.connector.events import GroupBytes, MissReason, SourceMiss
from kvferry.connector.messages import LoadPart
from kvferry.connector.peers.source import (
    IDLE_STEP_WAIT_SECONDS,
    STEP_WAIT_SECONDS,
    UNUSED_SECONDS,
    PeerSource,
)
from kvferry.geometry import Group, GroupKind
from kvferry.planning.select import LoadSpan
from kvferry.planning.template import build_templates, window_mismatches
from kvferry.tiers.names import TIERS
from kvferry.transport.handshake import Pending, Unusable
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import KeptTurn, PeerInfo, RankCard
from kvferry.transport.offer import Offer, write_offer
from kvferry.transport.read_plan import LoadFigures, Report
from kvferry.transport.redeem import Grant, NotRedeemed, Redeemed
from kvferry.transport.redemptions import Redemptions
from support.block_pool import request
from support.clock import Clock
from support.engines import ranks
from support.fake_engine import FakeEngine, PartialHalf
from support.lora import adapter, once_named, slow_files
from transport.cards import ATTENTION, cards, facts, spec, ticket

TOKENS = list(range(40))
ADDRESS = ("127.0.0.1", 5600)


class Client:
    """A control client that answers what a test says."""

    def __init__(self, status, redeemed=None):
        self.status, self.redeemed, self.asked, self.claimed, self.waits = status, redeemed, [], [], []
        self.held, self.released, self.forgotten, self.sealed = [], [], [], []
        self.redemptions = Redemptions(9, 5.0, Clock())

    def look_up(self, address, incarnation=None):
        return self.status

    def known(self, address):
        return self.status if isinstance(self.status, PeerInfo) else None

    def redeem(self, address, ticket, tokens, content, *, foreseen=False, sealed=""):
        self.sealed.append(sealed)
        claim = self.redemptions.begin(address, ticket, tokens, content)
        if claim.users == 1:
            self.claimed.append(name_of(ticket))
            self.asked.append((tokens, content))
        return claim

    def answer(self, claim, wait_seconds):
        self.waits.append(wait_seconds)
        if isinstance(self.redeemed, Redeemed):
            claim.answer = self.redeemed
        return self.redeemed

    def end(self, claim):
        if isinstance(self.redeemed, Unusable):
            claim.answer = NotRedeemed(claim.message.number, self.redeemed.reason)
        if self.redemptions.end(claim):
            self.released.append(name_of(claim.message.ticket))

    def hold(self, address, ticket):
        self.held.append(name_of(ticket))

    def release(self, address, ticket):
        self.released.append(name_of(ticket))

    def forget(self, address):
        self.forgotten.append(address)


NOBODY = Unusable("nobody answers")
RANKS = [card.geometry for card in cards()]
KNOWN = PeerInfo(facts("engine", 11), cards())
UNREDEEMED = "engine@127.0.0.1:5600"
PEER = f"{UNREDEEMED}#b"
GRANTED = Redeemed(0, Grant.of(LeaseWord(3, 7, 11), 40, [[1, 2, 3]]))


def name_of(ticket):
    return ticket.decode().rstrip(".")


class Turns:
    """Earlier turns that peers have, once they have answered."""

    def __init__(self, answer=None):
        self.answer, self.asked = answer, set()

    def ask(self, one):
        if self.answer is None:
            return None
        self.asked.add(one.request_id)
        return one.request_id

    def found(self, one, search):
        assert search == one.request_id
        if not isinstance(self.answer, Pending):
            self.asked.discard(one.request_id)
        return self.answer or None

    def drop(self, search):
        self.asked.remove(search)


def offered(name="a", of="theirs", **changes):
    """A request that came with an offer."""
    one = request(name, [*TOKENS, 99])
    one.kv_transfer_params = {**write_offer(Offer("engine", *ADDRESS, ticket(of).hex(), 40, 0)), **changes}
    return one


def with_peer(
    answer=KNOWN, ranks=RANKS, turns=None, most_held=2, redeemed=GRANTED, meets=(), idle=False
) -> FakeEngine:
    """An engine whose control client gives these answers of a peer."""
    engine = FakeEngine()
    engine.client, engine.turns = Client(answer, redeemed), Turns(turns)
    engine.loads = TransferBook(1, mock.Mock())
    engine.source = PeerSource(
        engine.client,
        ranks=ranks,
        loads=engine.loads,
        events=engine.events,
        timeout_seconds=30.0,
        most_held=most_held,
        turns=engine.turns,
        adapters=engine.adapters,
        idle=lambda: idle,
        meets=meets,
        clock=engine.clock,
    )
    engine.half = PartialHalf(source=engine.source)
    return engine


def refused(engine):
    return [event.reason for event in engine.told]


def test_the_head_of_a_load_ends_at_the_alignment_and_the_tail_begins_there():
    engine = with_peer()
    one = engine.arrive(offered())
    assert engine.source.ask(one, 8).bids
    assert engine.source.ask(one, 8).head(16) == Bid(PEER, (PlaceTokens("peer", 24),))
    assert engine.source.ask(one, 8).tail(16) == Bid(PEER, (PlaceTokens("peer", 24),))
    assert engine.source.ask(one, 8).tail(40) is None
    assert engine.source.ask(one, 32).bids
    assert engine.source.ask(one, 32).head(16) is None
    engine.client.status = Pending()
    assert engine.source.ask(one, 8).bids
    assert engine.source.ask(one, 8).head(16).looking
    assert engine.source.ask(one, 8).tail(16).looking


def test_a_ticket_is_redeemed_at_arrival_and_bid_once_it_is_granted_and_its_peer_known():
    engine = with_peer(Pending(), redeemed=Pending())
    one = engine.arrive(offered())
    assert engine.client.claimed == ["theirs"]
    assert engine.client.asked == [(40, content_of(one, 40, Adapters()))]
    looking = (Bid(UNREDEEMED, (PlaceTokens("peer", 32),), looking=True, promised=True),)
    assert engine.source.ask(one, 8).bids == looking
    assert engine.client.waits == [], "nobody waits for a peer that is being met"
    engine.client.status = KNOWN
    assert engine.source.ask(one, 8).bids == looking
    engine.client.redeemed = GRANTED
    assert engine.source.ask(one, 8).bids == (Bid(PEER, (PlaceTokens("peer", 32),)),)
    assert not engine.source.ask(one, 40).bids
    assert engine.client.released == []


def test_an_unanswered_peer_is_reported_once_when_the_request_goes_on():
    engine = with_peer(Pending(), redeemed=Pending())
    one = engine.arrive(offered())
    assert engine.source.ask(one, 8).bids[0].looking
    for _ in range(2):
        engine.source.settled("a")
    (told,) = engine.told
    assert (told.source, told.reason) == (
        UNREDEEMED, "it had not answered when the request went on without it",
    )  # fmt: skip


def test_a_read_is_ordered_from_a_peer_that_is_already_connected():
    engine = with_peer()
    one = engine.arrive(offered())
    load = engine.begin_load(one, 8)
    meta = engine.step()
    assert meta.connects == {PEER: KNOWN.ranks}
    (part,) = meta.parts
    assert (part.load, part.last, part.failure) == ("a#1", True, None)
    read = part.work
    assert (read.key, read.peer, read.span) == ("a#1.1", PEER, LoadSpan(8, 40, 41))
    assert [ids.tolist() for ids in read.src_tables] == [[1, 2, 3]]
    assert read.dst_tables is load.tables
    assert (read.lease.slot, read.lease.generation, read.lease.incarnation) == (3, 7, 11)
    assert engine.feeds[load.key].origin == "peer"
    engine.begin_load(engine.arrive(offered("b")))
    assert engine.step().connects == {}, "workers know it"
    assert engine.step().parts == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv": 42}, "42 tokens offered for a prompt of 41"),
        (
            {"prompt_token_ids": None},
            "the content of this prompt has no certain name: the prompt is not made",
        ),
    ],
)
def test_a_ticket_that_does_not_fit_the_prompt_is_not_redeemed(change, says):
    engine = with_peer()
    one = offered(remote_num_tokens=change.pop("kv", 40))
    vars(one).update(change)
    engine.arrive(one)
    assert (engine.source.ask(one, 0).bids, engine.client.claimed, engine.client.released) == ((), [], [])
    (reason,) = refused(engine)
    assert reason.startswith(says)


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.STATE])
def test_state_that_has_seen_the_whole_prompt_is_not_read(kind):
    """The engine computes the last token of a prompt in any case, and state would see it twice."""
    engine = with_peer(ranks=[replace(rank, groups=(replace(rank.groups[0], kind=kind),)) for rank in RANKS])
    whole, longer = request("a", TOKENS), offered("b")
    whole.kv_transfer_params = longer.kv_transfer_params
    engine.arrive(whole)
    of_state = kind is GroupKind.STATE
    assert bool(engine.source.ask(whole, 0).bids) != of_state
    assert [text[:40] for text in refused(engine)] == ["40 tokens offered for a prompt of 40, wh"] * of_state
    engine.half.excluded = {}
    assert engine.source.ask(engine.arrive(longer), 0).bids


def test_a_refused_ticket_is_excluded_and_not_released():
    """It may be somebody else's, who redeems it with the right prompt."""
    engine = with_peer(redeemed=Unusable("other tokens"))
    one = engine.arrive(offered())
    assert engine.source.ask(one, 0).bids == ()
    assert (refused(engine), engine.client.released) == (["other tokens"], [])
    engine.client.redeemed = GRANTED
    assert engine.source.ask(one, 0).bids == ()
    engine.source.settled("a")
    engine.source.finished("a")
    assert (engine.client.released, len(engine.source)) == ([], 0)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (PeerInfo(facts("other", 11), cards()), "engine other answers at the address of engine"),
        (PeerInfo(facts("engine", 12), cards()), "the engine has been restarted since it granted the lease"),
    ],
)
def test_an_unusable_peer_is_excluded_and_its_lease_released(answer, says):
    engine = with_peer(answer)
    one = engine.arrive(offered())
    assert not engine.source.ask(one, 0).bids
    assert (refused(engine), engine.client.released) == ([says], ["theirs"])
    engine.client.status = KNOWN
    assert not engine.source.ask(one, 0).bids, "its lease has been released"
    engine.source.settled("a")
    engine.source.finished("a")
    assert (engine.client.released, len(engine.source)) == (["theirs"], 0)


@pytest.mark.parametrize(("gone", "miss"), [(True, MissReason.GONE), (False, MissReason.REFUSED)])
@pytest.mark.parametrize("of", ["peer", "ticket"])
def test_a_peer_that_is_gone_is_told_apart_from_one_that_refuses(of, gone, miss):
    engine = with_peer(redeemed=Pending())
    one = engine.arrive(offered())
    assert engine.source.ask(one, 0).bids[0].promised
    setattr(engine.client, "status" if of == "peer" else "redeemed", Unusable("that is why", gone))
    assert not engine.source.ask(one, 0).bids
    assert engine.source.ask(one, 0).why_none() == SourceMiss("peer", miss, detail="that is why")


def test_a_peer_that_is_refused_when_a_request_arrives_is_not_sent_its_ticket():
    engine = with_peer(NOBODY)
    one = engine.arrive(offered())
    assert not engine.source.ask(one, 0).bids
    engine.client.status = KNOWN
    assert not engine.source.ask(one, 0).bids, "a claim of its ticket would never end"
    assert (refused(engine), engine.client.claimed, engine.client.released) == (["nobody answers"], [], [])


def test_a_peer_that_restarted_before_it_granted_a_ticket_is_looked_up_again():
    engine = with_peer(PeerInfo(facts("engine", 10), cards()))
    client = engine.client
    client.look_up = lambda _, of=None: (
        client.status if of in (None, client.status.facts.incarnation) else Pending()
    )
    one = engine.arrive(offered())
    looking = Bid(PEER, (PlaceTokens("peer", 32),), looking=True, promised=True)
    assert engine.source.ask(one, 8).bids == (looking,)
    engine.client.status = KNOWN
    assert engine.source.ask(one, 8).bids == (Bid(PEER, (PlaceTokens("peer", 32),)),)
    assert (refused(engine), engine.client.claimed) == ([], ["theirs"])


def test_a_grant_needs_a_block_table_for_each_group_of_the_peer():
    engine = with_peer(redeemed=Redeemed(0, Grant.of(LeaseWord(3, 7, 11), 40, [[1], [2], [3]])))
    one = engine.arrive(offered())
    assert engine.source.ask(one, 0).bids == ()
    assert refused(engine) == ["block tables for 3 groups, the peer has 1"]
    assert engine.client.released == ["theirs"]


def test_a_sealed_grant_goes_to_the_channel_with_its_ticket():
    engine = with_peer()
    engine.arrive(offered(remote_sealed_grant="sealed"))
    engine.arrive(offered("b"))
    assert engine.client.sealed == ["sealed", ""]


def test_an_offer_of_a_prompt_still_computed_has_no_grant_but_that_of_an_earlier_offer():
    """Its router has copied an earlier offer, and replaced the ticket."""
    engine = with_peer()
    engine.arrive(offered(remote_num_tokens=None, remote_sealed_grant="of another ticket"))
    assert engine.client.sealed == [""]


def refuse_claim(engine):
    """Have the producer refuse the claim after the grant was had."""
    engine.source._pulls["a"].redemption.answer = NotRedeemed(0, "its lease has ended")
    engine.client.redeemed = Unusable("its lease has ended")


def test_a_claim_that_is_refused_while_its_request_waits_is_not_read_for():
    engine = with_peer()
    one = engine.arrive(offered())
    assert engine.source.ask(one, 0).bids
    refuse_claim(engine)
    assert engine.source.ask(one, 0).bids == ()
    assert (refused(engine), engine.client.released) == (["its lease has ended"], [])


def test_a_claim_that_is_refused_before_its_read_is_ordered_ends_the_load():
    engine = with_peer()
    load = engine.begin_load(engine.arrive(offered()))
    refuse_claim(engine)
    (part,) = engine.step().parts
    assert (part.load, part.work, part.failure) == (load.key, None, "its lease has ended")


def test_a_claim_that_is_refused_while_its_blocks_are_read_leaves_the_word_to_decide():
    engine = with_peer()
    load = engine.begin_load(engine.arrive(offered()))
    assert engine.step().parts[0].work is not None
    refuse_claim(engine)
    assert engine.step().parts == []
    engine.end_load(load, Report(None))
    engine.source.settled("a")
    assert (refused(engine), engine.client.released) == ([], [])


def test_all_requests_of_a_step_share_the_time_to_wait_for_their_tickets():
    engine = with_peer(redeemed=Pending())
    ones = [engine.arrive(offered(name, of=name)) for name in "abcd"]

    def answer(_, wait_seconds):
        waits.append(wait_seconds)
        engine.clock.now += min(wait_seconds, STEP_WAIT_SECONDS * 0.4)
        return engine.client.redeemed

    waits, engine.client.answer = [], answer
    for one in ones:
        engine.source.ask(one, 0)
    assert waits == pytest.approx([STEP_WAIT_SECONDS * share for share in (1.0, 0.6, 0.2, 0.0)], abs=1e-9)
    engine.step()
    for one in (ones[0], engine.arrive(offered("e", of="e"))):
        engine.source.ask(one, 0)
    assert waits[-2:] == [0.0, STEP_WAIT_SECONDS], "only right after its question"


def test_a_question_takes_no_longer_for_each_one_before_it_in_a_step():
    engine = with_peer(redeemed=Pending())
    for name in "abcd":
        engine.source.ask(engine.arrive(offered(name, of=name)), 0)
    assert sum(map(len, engine.source.agenda)) == 1, "one sum of all waits"


@pytest.mark.parametrize(
    ("idle", "waits"),
    [
        (True, [IDLE_STEP_WAIT_SECONDS, 0.0, IDLE_STEP_WAIT_SECONDS]),
        (False, [STEP_WAIT_SECONDS, 0.0, 0.0]),
    ],
    ids=["idle", "computing"],
)
def test_no_step_waits_twice_and_a_computing_engine_waits_only_right_after_the_question(idle, waits):
    engine = with_peer(redeemed=Pending(), idle=idle)
    one, waited = engine.arrive(offered()), []

    def answer(_, wait_seconds):
        waited.append(wait_seconds)
        engine.clock.now += wait_seconds
        return Pending()

    engine.client.answer = answer
    for _ in range(2):
        engine.source.ask(one, 0)
    assert any(engine.source.agenda), "the next step may wait again"
    engine.step()
    engine.source.ask(one, 0)
    assert waited == pytest.approx(waits, abs=1e-9)


@pytest.mark.parametrize(("theirs", "alignment_tokens"), [(4, 4), (16, 16), (24, 8), (64, 16)])
def test_content_comes_in_what_blocks_of_both_sides_have_in_common(theirs, alignment_tokens):
    peer = RankCard(ranks(spec(block_tokens=theirs), [ATTENTION] * 2)[0], b"metadata", 4096, 64, 1)
    engine = with_peer(PeerInfo(facts("engine", 11), (peer,)))
    one = engine.arrive(offered())
    engine.client.status, known = Pending(), engine.client.status
    engine.source.ask(one, 0)
    assert engine.source.alignments("a") == (1,), "nothing is known of it"
    engine.client.status = known
    engine.source.ask(one, 0)
    assert engine.source.alignments("a") == (alignment_tokens,)


def as_kind(rank, kind, attention_span):
    return replace(
        rank, groups=tuple(replace(group, kind=kind, attention_span=attention_span) for group in rank.groups)
    )


SLIDING, CHUNKED, FULL = GroupKind.SLIDING, GroupKind.CHUNKED, GroupKind.FULL


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [((SLIDING, 64), (FULL, 0)), ((CHUNKED, 64), (FULL, 0)), ((SLIDING, 64), (SLIDING, 66))],
    ids=["hybrid manager off there", "the same, chunked", "draft modules there"],
)
def test_groups_of_peers_are_matched_by_their_layers(ours, theirs):
    mine = as_kind(ranks(spec(block_tokens=128), [ATTENTION] * 2)[0], *ours)
    peer = as_kind(ranks(spec(block_tokens=32, address=1 << 41), [ATTENTION] * 2)[0], *theirs)
    assert not window_mismatches([peer], mine), "the handshake lets them through"
    (template,) = build_templates([peer], mine)
    assert {route.cell_tokens for route in template.routes} == {32}
    engine = with_peer(PeerInfo(facts("engine", 11), (RankCard(peer, b"metadata", 4096, 64, 1),)), [mine])
    engine.source.ask(engine.arrive(offered()), 0)
    assert engine.source.alignments("a") == (32,)


def test_a_peer_whose_late_reads_hold_too_much_is_refused():
    engine = with_peer()
    one = engine.arrive(offered())
    engine.loads.begin(old := Transfer(key="old", holder=PEER, blocks=[1, 2, 3]))
    engine.loads.mark_late(old)
    assert not engine.source.ask(one, 0).bids
    assert refused(engine) == [
        "reads past their deadline still hold 3 blocks, and those of a peer may hold half of 2 (late_blocks)"
    ]


def test_reads_in_flight_count_for_what_late_ones_may_hold():
    """Any of them may be late a moment later, so there is no time to begin to count then."""
    engine = with_peer(most_held=8)
    (bid,) = engine.source.ask(engine.arrive(offered()), 0).bids
    assert engine.source.has_room(bid, 100), "a load that is alone may be larger"
    engine.loads.begin(Transfer(key="from tiers", holder=TIERS, blocks=[1] * 50))
    assert engine.source.has_room(bid, 100), "of those late ones hold nothing"
    engine.loads.begin(Transfer(key="one", holder=PEER, blocks=[1]))
    assert [engine.source.has_room(bid, blocks) for blocks in (3, 4)] == [True, False]
    engine.loads.begin(Transfer(key="of another", holder="another peer", blocks=[2, 3, 4, 5]))
    assert [engine.source.has_room(bid, blocks) for blocks in (1, 2)] == [True, False]
    engine.loads.mark_late(engine.loads["one"])
    assert [engine.source.has_room(bid, blocks) for blocks in (1, 2)] == [True, False]
    engine.loads.end("one", 1)
    assert [engine.source.has_room(bid, blocks) for blocks in (2, 3)] == [True, False]


@pytest.mark.parametrize(
    ("how", "anew"),
    [({}, False), ({"peer_lost": True}, True), ({"late": True}, True), ({"corrupt": True}, False)],
    ids=["another lease may hold", "it has gone", "it may have gone", "its bytes were damaged on the way"],
)
def test_a_failed_peer_is_excluded_and_reconnected_if_it_may_have_gone(how, anew):
    engine = with_peer()
    one = engine.arrive(offered())
    load = engine.begin_load(one)
    engine.end_load(load, Report("the lease was broken", **how))
    assert (engine.client.forgotten, engine.client.released) == ([ADDRESS] * anew, ["theirs"])
    assert engine.half.excluded[PEER] == "the lease was broken"
    assert not engine.source.ask(one, 0).bids
    assert engine.source.ask(one, 0).why_none() == SourceMiss(
        "peer", MissReason.REFUSED, detail="the lease was broken"
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [({}, MissReason.FAILED), ({"late": 1}, MissReason.DEADLINE), ({"corrupt": True}, MissReason.CHECKSUM)],
    ids=str,
)
def test_a_failed_load_is_a_miss_with_its_reason(how, reason):
    engine = with_peer()
    feed = engine.feeds[engine.begin_load(engine.arrive(offered())).key]
    assert feed.miss(Report("it broke", **how)) is reason


def test_loaded_bytes_are_reported_by_group_without_empty_groups():
    kinds = (GroupKind.FULL, 0), (GroupKind.SLIDING, 64), (GroupKind.STATE, 0)
    groups = tuple(Group(kind, 16, span, ()) for kind, span in kinds)
    engine = with_peer(ranks=[replace(RANKS[0], groups=groups)])
    feed = engine.feeds[engine.begin_load(engine.arrive(offered())).key]
    figures = LoadFigures(
        bytes_by_group=(640, 0, 8), strategies_by_group=(("direct",), (), ("direct", "staged"))
    )
    assert feed.moved(Report(None, figures=figures)) == (
        GroupBytes("0 full_attention", "direct", 640),
        GroupBytes(f"2 {groups[2].label}", "direct+staged", 8),
    )
    assert feed.moved(Report("no answer")) == ()


def test_a_lease_is_released_once_when_its_request_is_settled():
    engine = with_peer()
    one = engine.arrive(offered())
    load = engine.begin_load(one)
    engine.end_load(load, Report(None))
    assert engine.client.released == []
    for _ in range(2):
        engine.source.settled("a")
    assert engine.client.released == ["theirs"]
    assert not engine.source.ask(one, 0).bids, "preempted, it has no lease any more"


def test_samples_that_share_a_prompt_release_it_once_with_the_last():
    engine = with_peer()
    for name in ("a", "b"):
        engine.arrive(offered(name))
    engine.source.settled("a")
    engine.source.settled("a")
    assert engine.client.released == []
    engine.source.settled("b")
    assert engine.client.released == ["theirs"]


def test_a_ticket_with_another_prompt_does_not_release_what_a_request_here_reads():
    """The second request may be a thief's, and ends before the producer has answered."""
    engine = with_peer()
    engine.arrive(offered("a"))
    thief = request("b", [*TOKENS[:-1], 7, 99])
    thief.kv_transfer_params = offered().kv_transfer_params
    engine.arrive(thief)
    assert engine.client.claimed == ["theirs", "theirs"], "each with its own prompt"
    engine.source.settled("b")
    assert engine.client.released == []
    engine.source.settled("a")
    assert engine.client.released == ["theirs"]


def test_a_request_that_was_rejected_ends_no_lease():
    """vLLM names its offer with a request of one made-up token; its ticket may be a stolen one."""
    engine = with_peer()
    engine.arrive(offered("a"))
    for name, of in (("b", "theirs"), ("c", "another")):
        one = request(name, [0], abort_immediately=True)
        one.kv_transfer_params = offered(of=of).kv_transfer_params
        assert not engine.source.arrived(one, engine.half.excluded)
        engine.source.finished(name)
    assert refused(engine) == [], "nothing is wrong with its offer"
    assert (engine.client.claimed, engine.client.released) == (["theirs"], [])


@pytest.mark.parametrize(
    ("params", "count"),
    [(None, 0), ({"do_remote_decode": True}, 0), ({"do_remote_prefill": True}, 1)],
)
def test_a_request_without_an_offer_that_can_be_read_is_not_served(params, count):
    engine = with_peer()
    one = request("a", TOKENS, kv_transfer_params=params)
    assert not engine.source.arrived(one, engine.half.excluded)
    assert (len(refused(engine)), engine.client.claimed, len(engine.source)) == (count, [], 0)


def test_workers_connect_to_a_configured_peer_before_the_first_ticket_and_after_its_restart():
    engine = with_peer(Pending(), meets=[ADDRESS])
    assert not engine.source.busy
    assert engine.step().connects == {}
    for run, name in ((11, PEER), (12, f"{UNREDEEMED}#c")):
        engine.client.status = PeerInfo(facts("engine", run), cards())
        assert engine.source.busy, "an idle engine runs a step for it"
        assert engine.step().connects == {name: cards()}
        assert not engine.source.busy
        assert engine.step().connects == {}


def test_workers_disconnect_an_unused_peer():
    engine = with_peer()
    engine.end_load(engine.begin_load(engine.arrive(offered())), Report(None))
    engine.clock.now += UNUSED_SECONDS
    assert engine.step().disconnects == []
    engine.clock.now += 1
    assert engine.step().disconnects == [PEER]
    assert engine.step().disconnects == []
    engine.begin_load(engine.arrive(offered("b")))
    assert engine.step().connects == {PEER: KNOWN.ranks}


def test_the_end_of_an_earlier_load_leaves_a_peer_in_use_by_the_next_one():
    engine = with_peer()
    one = engine.arrive(offered())
    earlier, load = engine.begin_load(one), engine.begin_load(one)
    engine.end_load(earlier, Report("another part of the prefix has failed"), wanted=False)
    engine.clock.now += UNUSED_SECONDS + 1
    assert engine.step().disconnects == []
    engine.end_load(load, Report(None))
    assert engine.step().disconnects == [PEER]


def test_workers_disconnect_only_the_unused_peer():
    engine, other = with_peer(), PEER.replace("5600", "5601")
    loads = [engine.begin_load(engine.arrive(offered("a")))]
    engine.clock.now += 1
    loads.append(engine.begin_load(engine.arrive(offered("b", remote_port=5601))))
    engine.clock.now += 1
    loads.append(engine.begin_load(engine.arrive(offered("c"))))
    for load in loads:
        engine.end_load(load, Report(None))
    engine.step()
    engine.clock.now += UNUSED_SECONDS - 0.5
    assert engine.step().disconnects == [other]
    engine.clock.now += 1
    assert engine.step().disconnects == [PEER]


def test_runs_of_a_peer_that_no_load_reads_from_are_forgotten():
    engine = with_peer()
    for incarnation in range(11, 14):
        engine.client.status = PeerInfo(facts("engine", incarnation), cards())
        grant = structs.replace(GRANTED.grant, incarnation=incarnation)
        engine.client.redeemed = structs.replace(GRANTED, grant=grant)
        one = engine.arrive(offered(f"a{incarnation}"))
        assert engine.source.ask(one, 0).bids
        assert engine.source.alignments(one.request_id) == (16,)
    assert len(engine.source._runs) == 3
    engine.clock.now += UNUSED_SECONDS + 1
    assert engine.step().disconnects == [], "the workers have never met them"
    assert len(engine.source._runs) == 0


KEPT = Grant.of(LeaseWord(3, 7, 11), 50, [[1, 2, 3]])
TURN = (40, ADDRESS, KeptTurn("engine", ticket("earlier"), KEPT, 1, 1, []))


def test_a_request_without_an_offer_gets_that_of_an_earlier_turn_once_peers_have_answered():
    engine = with_peer(turns=Pending())
    one = engine.arrive(request("a", [*TOKENS, 99]))
    (bid,) = engine.source.ask(one, 8).bids
    assert (bid.looking, bid.tokens) == (True, 32)
    assert not bid.promised, "nobody has said that there is such a turn"
    engine.turns.answer = TURN
    assert engine.source.ask(one, 8).bids == (Bid(PEER, (PlaceTokens("peer", 32),)),)
    assert engine.client.held == ["earlier"]
    assert engine.source.ask(one, 8).head(16) == Bid(PEER, (PlaceTokens("peer", 24),))
    engine.source.settled("a")
    engine.source.finished("a")
    assert (engine.client.released, len(engine.source)) == (["earlier"], 0)


def test_a_looking_peer_bids_for_the_tail_of_another_sources_head():
    engine = with_peer(turns=Pending())
    one = engine.arrive(request("a", [*TOKENS, 99]))
    engine.source.ask(one, 8)
    for bid, tokens in (
        (engine.source.ask(one, 8).head(16), 24),
        (engine.source.ask(one, 8).tail(16), 24),
        (engine.source.ask(one, 8).tail(39), 1),
    ):
        assert (bid.looking, bid.tokens) == (True, tokens)
    assert engine.source.ask(one, 8).tail(40) is None, "the last token is computed"
    engine.turns.answer = False
    assert engine.source.ask(one, 8).bids == ()
    assert (engine.source.ask(one, 8).head(16), engine.source.ask(one, 8).tail(16)) == (None, None)


def test_no_bid_is_made_if_no_peer_has_an_earlier_turn():
    engine = with_peer(turns=False)
    one = engine.arrive(request("a", [*TOKENS, 99]))
    assert engine.source.ask(one, 0).bids == ()
    assert (engine.source.ask(one, 0).head(16), engine.source.ask(one, 0).tail(16)) == (None, None)
    assert engine.source.ask(one, 0).why_none().reason is MissReason.NOT_STORED
    engine.source.settled("a")
    engine.source.finished("a")
    assert engine.client.held == engine.client.released == []


def test_a_request_that_ends_while_peers_are_asked_leaves_nothing():
    engine = with_peer(turns=Pending())
    one = engine.arrive(request("a", [*TOKENS, 99]))
    engine.source.ask(one, 0)
    engine.source.settled("a")
    engine.source.finished("a")
    assert engine.turns.asked == set()


@pytest.mark.parametrize("answered", [False, True])
def test_after_a_reset_an_earlier_turn_that_was_found_before_is_not_bid(answered):
    engine = with_peer(turns=TURN if answered else Pending())
    one = engine.arrive(request("a", [*TOKENS, 99]))
    assert engine.source.ask(one, 0).bids
    engine.source.start_anew()
    engine.turns.answer = TURN
    assert engine.source.ask(one, 0).bids == ()
    assert engine.client.released == (["earlier"] if answered else [])


def test_after_a_reset_no_offer_that_came_before_is_bid():
    engine = with_peer()
    waiting, loading, _ = (engine.arrive(offered(name, of=name)) for name in "abc")
    load = engine.begin_load(loading)
    engine.source.settled("c")
    engine.source.start_anew()
    assert engine.client.released == ["c", "a", "b"], "what is being read is not believed either"
    assert engine.source.ask(waiting, 0).bids == engine.source.ask(loading, 0).bids == ()
    assert refused(engine) == ["the cache was reset"] * 2, "before and after its ticket was redeemed"
    engine.end_load(load, Report("the producer gave the blocks back"))
    assert engine.source.ask(engine.arrive(offered("d")), 0).bids, "what comes is"


def test_an_engine_that_stopped_reading_takes_no_offer_and_asks_for_no_turn():
    engine = with_peer(turns=Pending())
    before = engine.arrive(offered("a", "before"))
    engine.source.stop_reading("weights have changed")
    assert not engine.source.ask(before, 0).bids
    after = offered("b", "after")
    assert engine.source.arrived(after, {})
    assert not engine.source.ask(after, 0).bids
    assert engine.source.ask(after, 0).why_none() == SourceMiss(
        "peer", MissReason.REFUSED, detail="weights have changed"
    )
    assert refused(engine) == ["the cache was reset", "weights have changed"]
    assert engine.client.claimed == engine.client.released == ["before", "after"], "no lease waits to run out"
    assert not engine.source.arrived(request("c", [*TOKENS, 99]), {})
    assert not engine.turns.asked


def test_no_request_waits_for_peers_if_only_the_last_token_is_missing():
    engine = with_peer(turns=Pending())
    assert engine.source.ask(engine.arrive(request("a", [*TOKENS, 99])), 40).bids == ()


def test_a_request_without_an_offer_is_declined_if_no_peer_keeps_turns():
    assert not with_peer().source.arrived(request("a", [*TOKENS, 99]), {})


def test_a_ticket_is_redeemed_once_the_adapter_of_its_prompt_was_read(tmp_path):
    engine, one = with_peer(), offered()
    one.lora_request = adapter(tmp_path)
    with slow_files() as go_on:
        engine.arrive(one)
        (bid,) = engine.source.ask(one, 0).bids
        assert bid.looking
        assert (engine.client.claimed, refused(engine)) == ([], [])
        go_on.set()
        once_named(lambda: engine.adapters.name(one.lora_request))
    (bid,) = engine.source.ask(one, 0).bids
    assert (bid.tokens, bid.looking) == (40, False)
    ((_, content),) = engine.client.asked
    assert content.adapter == engine.adapters.name(one.lora_request)


def test_an_adapter_that_is_never_read_does_not_delay_a_request_for_ever(tmp_path):
    engine, one = with_peer(), offered()
    one.lora_request = adapter(tmp_path)
    with slow_files() as go_on:
        engine.arrive(one)
        engine.clock.now += 30.0
        assert engine.source.ask(one, 0).bids == ()
        (why,) = refused(engine)
        assert why.endswith("are still being read for their digest, after 30 s")
        go_on.set()


def some_of_it(tokens, blocks=(1, 2, 3), generation=7):
    return Redeemed(0, Grant.of(LeaseWord(3, generation, 11), tokens, [list(blocks)]))


def streaming(granted=16):
    """A request whose prompt its peer computes, and the load of it."""
    engine = with_peer(redeemed=some_of_it(granted))
    one = engine.arrive(offered(remote_num_tokens=None))
    return engine, one, engine.begin_load(one)


def spans(meta):
    return [(part.work.span.begins, part.work.span.ends, part.last) for part in meta.parts]


def test_an_offer_without_a_number_of_tokens_is_of_all_but_the_last():
    engine = with_peer(redeemed=Pending())
    one = engine.arrive(offered(remote_num_tokens=None))
    assert engine.client.asked == [(40, content_of(one, 40, Adapters()))]
    looking = Bid(UNREDEEMED, (PlaceTokens("peer", 40),), looking=True, promised=True, growing=True)
    assert engine.source.ask(one, 0).bids == (looking,)
    engine.client.redeemed = some_of_it(16)
    assert engine.source.ask(one, 0).bids == (Bid(PEER, (PlaceTokens("peer", 40),), growing=True),)
    engine.client.redeemed = some_of_it(40)
    assert engine.source.ask(one, 0).bids == (Bid(PEER, (PlaceTokens("peer", 40),)),)
    short = request("b", [1])
    short.kv_transfer_params = offered(remote_num_tokens=None).kv_transfer_params
    assert not engine.source.arrived(short, {}), "nothing of it can be loaded"


def test_a_load_is_read_as_its_peer_computes_it():
    engine, _, load = streaming()
    meta = engine.step()
    assert spans(meta) == [(0, 16, False)]
    assert [part.load for part in meta.parts] == [load.key]
    assert engine.step().parts == []
    engine.client.redeemed = some_of_it(39, (1, 2, 3))
    assert spans(engine.step()) == [(16, 32, False)]
    engine.client.redeemed = some_of_it(40, (1, 2, 9))
    meta = engine.step()
    assert spans(meta) == [(32, 40, True)]
    assert meta.parts[0].work.src_tables[0].tolist() == [1, 2, 9], "as the last grant has it"
    assert engine.step().parts == []
    engine.source.settled("a")
    assert engine.client.released == ["theirs"]


def test_a_load_is_begun_with_its_first_message_even_if_nothing_can_be_read_yet():
    engine, _, load = streaming(granted=8)
    assert engine.step().parts == [LoadPart(load.key, None)]
    assert engine.step().parts == []
    engine.client.redeemed = some_of_it(15)
    assert engine.step().parts == [LoadPart(load.key, None)], "its deadline begins anew"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Unusable("its lease has ended"), "its lease has ended"),
        (some_of_it(32, generation=8), "the peer has replaced the lease"),
        (Redeemed(0, Grant.of(LeaseWord(3, 7, 12), 32, [[1, 2, 3]])), "the peer has replaced the lease"),
    ],
)
def test_a_load_whose_peer_ends_the_lease_fails_once_and_is_not_read_on(answer, why):
    engine, _, load = streaming()
    engine.step()
    engine.client.redeemed = answer
    (told,) = engine.step().parts
    assert (told.load, told.work) == (load.key, None)
    assert told.failure.startswith(why)
    assert engine.step().parts == []
    engine.end_load(load, Report(told.failure))
    assert refused(engine) == [told.failure]
    assert not engine.source.ask(offered(), 0).bids


def test_workers_keep_a_peer_while_a_load_from_it_grows():
    engine, _, load = streaming()
    engine.step()
    engine.clock.now += UNUSED_SECONDS + 1
    assert engine.step().disconnects == []
    engine.client.redeemed = some_of_it(40)
    assert spans(engine.step()) == [(16, 40, True)]
    assert engine.step().disconnects == []
    engine.end_load(load, Report(None))
    assert engine.step().disconnects == [PEER]


def test_a_load_is_read_at_the_end_if_its_peer_keeps_windows_where_this_engine_keeps_all():
    groups = tuple(Group(GroupKind.SLIDING, one.block_tokens, 16, one.layers) for one in RANKS[0].groups)
    theirs = tuple(structs.replace(card, geometry=replace(card.geometry, groups=groups)) for card in cards())
    engine = with_peer(structs.replace(KNOWN, ranks=theirs), redeemed=some_of_it(16))
    engine.begin_load(engine.arrive(offered(remote_num_tokens=None)))
    assert [part.work for part in engine.step().parts] == [None]
    engine.client.redeemed = some_of_it(40)
    assert spans(engine.step()) == [(0, 40, True)]


def test_a_load_that_no_request_waits_for_is_not_read_on():
    engine, _, load = streaming()
    engine.step()
    engine.feeds[load.key].drop()
    engine.source.settled("a")
    engine.source.finished("a")
    engine.client.redeemed = some_of_it(40)
    (told,) = engine.step().parts
    assert (told.work, told.failure) == (None, "no request waits for it any more")
    engine.feeds[load.key].drop()
    assert engine.step().parts == []
    assert engine.client.released == ["theirs"]


def test_a_load_that_was_reported_is_not_read_on():
    engine, _, load = streaming()
    engine.step()
    engine.end_load(load, Report("its deadline passed", late=True), wanted=False)
    engine.client.redeemed = some_of_it(40)
    assert engine.step().parts == []


def test_after_a_reset_a_load_is_not_read_on():
    engine, _, load = streaming()
    engine.step()
    engine.source.start_anew()
    (told,) = engine.step().parts
    assert (told.load, told.work, told.failure) == (load.key, None, "the cache was reset")
    assert engine.step().parts == []


def admit(one, own=0):
    """vLLM admits a request, of which its own caches have so many tokens."""
    one.prefill_stats = PrefillStats()
    one.prefill_stats.set(one.num_prompt_tokens, own, 0)


def test_the_answer_reports_what_the_caches_of_the_prefill_engine_had():
    engine = with_peer(redeemed=structs.replace(some_of_it(16), cached_tokens=12))
    one = engine.arrive(offered(remote_num_tokens=None))
    engine.begin_load(one)
    admit(one)
    engine.source.settled("a")
    assert one.cached_tokens == 12


def test_a_number_that_comes_while_another_source_loads_is_reported():
    engine = with_peer(redeemed=Pending())
    one = engine.arrive(offered(remote_num_tokens=None))
    admit(one, own=32)
    engine.client.redeemed = structs.replace(some_of_it(16), cached_tokens=12)
    engine.source.settled("a")
    assert one.cached_tokens == 12
    assert engine.client.released == ["theirs"]


def test_the_number_of_an_offer_is_reported_at_every_admission():
    engine = with_peer()
    one = engine.arrive(offered(remote_prefill_cached_tokens=12))
    load = engine.begin_load(one)
    admit(one)
    engine.end_load(load, Report("its lease has ended"))
    assert one.cached_tokens == 12
    admit(one, own=32)
    engine.source.settled("a")
    assert one.cached_tokens == 12


@pytest.mark.parametrize("redeemed", [Pending(), NOBODY, some_of_it(16)])
def test_without_a_number_the_engine_reports_its_own_caches(redeemed):
    engine = with_peer(redeemed=redeemed)
    one = engine.arrive(offered(remote_num_tokens=None))
    admit(one, own=32)
    engine.source.settled("a")
    assert one.cached_tokens == 32


def test_nothing_is_reported_once_the_answer_has_begun():
    engine = with_peer()
    one = engine.arrive(offered(remote_prefill_cached_tokens=12))
    one.prefill_stats = None
    engine.source.settled("a")
    assert one.cached_tokens is None
