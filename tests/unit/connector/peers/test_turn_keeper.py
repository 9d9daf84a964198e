"""Kept turns: blocks of finished requests that peers find, and that give way when the engine needs them."""

from __future__ import annotations

import pytest

from kvferry.connector.content import CHUNK_TOKENS, TurnNames
from kvferry.connector.engine import CacheGroup
from kvferry.connector.events import LeaseGranted
from kvferry.geometry import GroupKind
from kvferry.transport.messages import AskTurn, KeptTurn
from support.block_pool import request
from support.fake_engine import FakeEngine, events_of
from support.producers import confirm, producing

BLOCK = 16
FULL, SLIDING, STATE = GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE
SECONDS = 60.0
WINDOW = 64


def keeping(*kinds, share=0.5, steps_in_flight=1, speculates=False, **more) -> FakeEngine:
    """An engine that keeps turns, with a KV cache group of each of these kinds."""
    groups = tuple(
        CacheGroup(
            kind=kind,
            attention_span=WINDOW if kind is SLIDING else 0,
            block_tokens=BLOCK,
            state_block_tokens=BLOCK if kind is STATE else 0,
        )
        for kind in kinds or (FULL,)
    )
    facts = {"steps_in_flight": steps_in_flight, "speculates": speculates}
    return producing(groups, facts=facts, lease_slots=8, turn_seconds=SECONDS, turn_share=share, **more)


def finish(engine, one, *gone, tokens=None) -> bool:
    """End a request that has blocks for so many tokens, by default for all; return whether they are kept.

    The first `gone` blocks of each group are null.
    """
    kept, tokens = engine.producer.leases, one.num_tokens if tokens is None else tokens
    engine.arrive(one)
    assert engine.cover(one, tokens)
    for group, table in zip(engine.facts.groups, engine.tables[one.request_id], strict=True):
        if group.kind is STATE:
            table.extend(engine.pool.allocate(-(-tokens // BLOCK)))
    for table, blocks in zip(engine.tables[one.request_id], gone, strict=False):
        engine.drop(table, blocks)
    engine.finish(one, is_complete=one.is_complete)
    return engine.producer.leases > kept


def found(engine, one) -> list[KeptTurn]:
    """What a peer finds of a prompt."""
    content = engine.names.content(one, one.num_tokens)
    return engine.channel.turns.find(AskTurn(0, CHUNK_TOKENS, list(content.keys))).kept


def ended(engine) -> set[str]:
    """Turns that end with the next step."""
    return set(engine.step().raised)


def turn(name="a", tokens=300, ahead=0, is_complete=True, **more):
    computed = tokens - 1 + ahead
    return request(name, list(range(tokens)), num_computed_tokens=computed, is_complete=is_complete, **more)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_turn_is_found_once_all_steps_under_way_have_ended(steps_in_flight):
    engine, one = keeping(steps_in_flight=steps_in_flight), turn()
    assert finish(engine, one)
    for _ in range(steps_in_flight):
        assert not ended(engine)
        assert not found(engine, one)
    engine.step()
    assert found(engine, one)
    (granted,) = events_of(engine, LeaseGranted)
    assert (granted.tokens, granted.seconds, granted.turn) == (299, SECONDS, True)


def test_short_aborted_or_unnameable_requests_are_not_kept():
    engine = keeping()
    assert not finish(engine, turn(tokens=CHUNK_TOKENS))
    assert finish(engine, turn("b", tokens=CHUNK_TOKENS + 1))
    assert not finish(engine, turn("c", is_complete=False))
    assert not finish(engine, turn("d", prompt_embeds=object()))
    assert not finish(engine, request("e", [-1] * 300, num_computed_tokens=299))


@pytest.mark.parametrize(("ahead", "tokens"), [(0, 299), (1, 300)])
def test_a_kept_state_covers_the_tokens_that_were_computed(ahead, tokens):
    engine, one = keeping(FULL, STATE), turn(ahead=ahead)
    engine.arrive(one)
    state = engine.tables["a"][1]
    state.extend(engine.pool.allocate(19))
    engine.cover(one, 300)
    wanted = state[(tokens - 1) // BLOCK].block_id
    engine.finish(one)
    engine.step()
    engine.step()
    (kept,) = found(engine, turn(tokens=400))
    assert (kept.grant.tokens, kept.min_prefix_tokens) == (tokens, tokens)
    assert kept.grant.block_ids[1].tolist() == [wanted]


def test_a_state_that_may_be_of_other_tokens_is_not_kept():
    assert not finish(keeping(FULL, STATE), turn(ahead=2))
    assert not finish(keeping(FULL, STATE, speculates=True), turn())
    assert finish(keeping(FULL, speculates=True), turn())
    assert not finish(keeping(FULL, STATE), turn(), 0, 19)


@pytest.mark.parametrize("computed", [0, 298])
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SLIDING), (FULL, STATE)])
def test_a_request_that_ends_while_its_blocks_are_recomputed_is_not_kept(kinds, computed):
    engine, one = keeping(*kinds), request("a", list(range(300)), num_computed_tokens=computed)
    assert not finish(engine, one, tokens=computed)
    assert engine.told == []


def test_a_kept_window_can_be_continued_from_where_it_is_whole():
    engine = keeping(FULL, SLIDING)
    assert finish(engine, turn(), 0, 14)
    engine.step()
    engine.step()
    (kept,) = found(engine, turn(tokens=400))
    # The window of this position begins with the first block that is there.
    assert kept.min_prefix_tokens == 14 * BLOCK + WINDOW - 1
    assert not finish(keeping(FULL, SLIDING), turn(), 0, 18)


def test_a_turn_that_lacks_a_block_of_full_attention_is_not_kept():
    assert not finish(keeping(), turn(), 1)


def test_a_longer_turn_of_a_conversation_replaces_the_shorter_one():
    engine = keeping()
    other = request("other", [*range(290), *range(9)], num_computed_tokens=298)
    finish(engine, turn("a"))
    finish(engine, other)
    assert not ended(engine)
    finish(engine, turn("b", tokens=400))
    assert ended(engine) == {"a"}
    engine.step()
    assert found(engine, turn(tokens=400))[0].grant.tokens == 399
    assert found(engine, other)


def test_the_oldest_turns_end_when_they_hold_too_many_blocks():
    engine = keeping(blocks=100)
    assert not finish(engine, turn("larger than all", tokens=900))
    for name in ("a", "b", "c"):
        assert finish(engine, turn(name, tokens=300, cache_salt=name))
    assert ended(engine) == {"a"}, "19 blocks each, 50 may be kept"
    assert not ended(engine)


def test_the_oldest_turns_end_when_few_blocks_are_free():
    engine = keeping(blocks=160, share=1.0)
    for name in ("a", "b", "c"):
        finish(engine, turn(name, cache_salt=name))
    engine.leave_free(10)
    assert not ended(engine)
    engine.leave_free(9)
    assert ended(engine) == {"a"}
    assert not ended(engine), "its blocks will soon be free"
    confirm(engine, "a")
    engine.leave_free(0)
    assert ended(engine) == {"b"}
    assert len(engine.channel.turns) == 1


@pytest.mark.parametrize(
    ("kinds", "tokens", "wants"),
    [((FULL,), 1000, 64), ((FULL, SLIDING), 300, 40), ((FULL, SLIDING), 1000, 86)],
)
def test_turns_end_for_a_waiting_request_that_needs_more_blocks_than_are_free(kinds, tokens, wants):
    engine = keeping(*kinds, blocks=200, share=1.0)
    for name in ("a", "b"):
        finish(engine, turn(name, cache_salt=name))
    large = engine.arrive(request("large", list(range(tokens)), needs_blocks=True))
    engine.leave_free(wants)
    assert not ended(engine)
    engine.leave_free(wants - 1)
    assert ended(engine) == {"a"}
    confirm(engine, "a")
    large.needs_blocks = False
    engine.leave_free(62)
    assert not ended(engine)
    engine.leave_free(wants - 1)
    large.needs_blocks = True
    engine.finish(large, is_complete=False)
    assert not ended(engine)


def test_blocks_of_a_turn_are_pinned_until_all_workers_have_raised_the_word():
    engine = keeping(FULL, SLIDING, STATE, workers=2)
    assert not engine.producer.turns.busy
    assert finish(engine, turn(), 0, 14)
    assert engine.pool.references == 19 + 5 + 1, "only the offered state is pinned"
    assert engine.producer.turns.busy
    engine.step()
    engine.step()
    assert not engine.producer.turns.busy, "it is found"
    engine.producer.drain()
    assert engine.producer.turns.busy
    assert ended(engine) == {"a"}
    confirm(engine, "never kept")
    confirm(engine, "a")
    assert (engine.pool.references, engine.producer.turns.busy, engine.producer.turns.holds_blocks) == (
        25,
        True,
        True,
    )
    confirm(engine, "a")
    assert (engine.pool.references, engine.producer.turns.busy, engine.producer.turns.holds_blocks) == (
        0,
        False,
        False,
    )


def test_no_turn_is_kept_when_all_lease_slots_are_in_use():
    engine = keeping()
    kept = [finish(engine, turn(str(n), cache_salt=str(n))) for n in range(9)]
    assert kept == [True] * 8 + [False]


def test_a_reset_ends_all_turns_and_renames_later_ones():
    engine, one = keeping(), turn()
    finish(engine, one)
    engine.step()
    engine.step()
    content = engine.names.content(one, one.num_tokens)
    asked = AskTurn(0, CHUNK_TOKENS, list(content.keys))
    assert engine.channel.turns.find(asked).kept
    engine.names.start_anew()
    engine.producer.reset()
    assert engine.channel.turns.find(asked).kept == [], "even before the next step"
    assert ended(engine) == {"a"}
    finish(engine, turn("b"))
    engine.step()
    engine.step()
    content = TurnNames(engine.adapters).content(one, one.num_tokens)
    assert engine.channel.turns.find(AskTurn(0, CHUNK_TOKENS, list(content.keys))).kept == []
