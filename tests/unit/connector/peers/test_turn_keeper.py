"""Blocks of finished requests are kept, found when nothing is in flight any more, and give way."""

from __future__ import annotations

import pytest

from kvferry.connector.adapters import Adapters
from kvferry.connector.blocks_wanted import BlocksWanted
from kvferry.connector.engine import CacheGroup
from kvferry.connector.peers import turn_keeper
from kvferry.connector.peers.turn_keeper import TurnKeeper
from kvferry.connector.peers.turn_names import CHUNK_TOKENS, TurnNames
from kvferry.connector.stream import EventStream
from kvferry.geometry import GroupKind
from kvferry.transport.lease import LeaseBook
from kvferry.transport.messages import AskTurn
from kvferry.transport.turns import TurnIndex
from support.block_pool import BlockPool, request
from support.clock import Clock
from support.engine_info import made_up

BLOCK = 16
FULL, SLIDING, STATE = GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE
SECONDS = 60.0
WINDOW = 64


class Pool(BlockPool):
    """Its requests have all blocks; how many are free is what a test says."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.allocate(blocks - 1)
        self.free_blocks_said = blocks

    def get_num_free_blocks(self) -> int:
        return self.free_blocks_said

    @property
    def pinned(self) -> int:
        return self.references - len(self.blocks) + 1


class Engine:
    def __init__(self, kinds=(FULL,), blocks=1000, share=0.5, batches=1, drafts=None, workers=1) -> None:
        self.clock, self.names, self.told = Clock(), TurnNames(Adapters()), []
        self.book = LeaseBook(1, 8, 30.0, self.clock)
        spans = {GroupKind.SLIDING: WINDOW}
        engine = made_up(
            engine_id="D",
            groups=tuple(
                CacheGroup(
                    kind=kind,
                    attention_span=spans.get(kind, 0),
                    block_tokens=BLOCK,
                    state_block_tokens=BLOCK if kind is STATE else 0,
                )
                for kind in kinds
            ),
            num_blocks=blocks,
            steps_in_flight=batches,
            speculates=drafts is not None,
        )
        self.wanted = BlocksWanted(engine.groups, engine.tokens_in_flight)
        self.keeper = TurnKeeper(
            engine,
            book=self.book,
            names=self.names,
            wanted=self.wanted,
            events=EventStream(self.told.append),
            seconds=SECONDS,
            share=share,
        )
        self.kinds, self.index, self.pool = kinds, TurnIndex(), Pool(blocks)
        self.keeper.start(self.index, self.pool, workers)

    def finish(self, one, tables=None) -> bool:
        """A request ends; its blocks are all there unless said otherwise."""
        blocks = -(-one.num_tokens // BLOCK)
        ids = tables or [list(range(1, blocks + 1)) for _ in self.kinds]

        self.keeper.finished(one, ids)
        return one.request_id in self.keeper

    def step(self) -> list[str]:
        over = self.keeper.step()
        for name in self.book.end(over):
            self.keeper.ended(name)
        return over

    def give_back(self, *names) -> None:
        for name in names:
            assert self.keeper.on_workers_confirmed(name, 1)

    def finds(self, one) -> bool:
        content = self.names.content(one, one.num_tokens)
        return self.index.find(AskTurn(0, CHUNK_TOKENS, list(content.keys))).kept != []


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    monkeypatch.setattr(turn_keeper.time, "monotonic", lambda: 5.0)


def turn(name="a", tokens=300, ahead=0, is_complete=True, **more):
    computed = tokens - 1 + ahead
    return request(name, list(range(tokens)), num_computed_tokens=computed, is_complete=is_complete, **more)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_it_is_found_once_all_steps_that_were_under_way_have_ended(batches):
    engine, one = Engine(batches=batches), turn()
    assert engine.finish(one)
    for _ in range(batches):
        assert engine.step() == []
        assert not engine.finds(one)
    engine.step()
    assert engine.finds(one)
    (granted,) = engine.told
    assert (granted.tokens, granted.seconds, granted.turn) == (299, SECONDS, True)


def test_what_is_short_or_was_cut_off_or_has_no_name_is_not_kept():
    engine = Engine()
    assert not engine.finish(turn(tokens=CHUNK_TOKENS))
    assert engine.finish(turn("b", tokens=CHUNK_TOKENS + 1))
    assert not engine.finish(turn("c", is_complete=False))
    assert not engine.finish(turn("d", prompt_embeds=object()))
    assert not engine.finish(request("e", [-1] * 300, num_computed_tokens=299))


@pytest.mark.parametrize(("ahead", "tokens"), [(0, 299), (1, 300)])
def test_a_state_is_that_after_what_was_computed_be_it_a_token_ahead(ahead, tokens):
    engine = Engine((FULL, STATE))
    assert engine.finish(turn(ahead=ahead))
    (kept,) = [one.kept for one in engine.keeper._turns.values()]
    assert (kept.tokens, kept.min_prefix_tokens) == (tokens, tokens)
    assert kept.grant.block_ids[1].tolist() == [(tokens - 1) // BLOCK + 1]


def test_a_state_that_is_not_certainly_that_of_the_tokens_is_not_kept():
    assert not Engine((FULL, STATE)).finish(turn(ahead=2))
    assert not Engine((FULL, STATE), drafts=object()).finish(turn())
    assert Engine((FULL,), drafts=object()).finish(turn())
    blocks = list(range(1, 20))
    assert not Engine((FULL, STATE)).finish(turn(), [blocks, [0] * 19])


@pytest.mark.parametrize("computed", [0, 200])
@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SLIDING), (FULL, STATE)])
def test_what_ended_while_its_blocks_were_computed_anew_is_not_kept(kinds, computed):
    engine, one = Engine(kinds), request("a", list(range(300)), num_computed_tokens=computed)
    blocks = list(range(1, -(-computed // BLOCK) + 1))
    assert not engine.finish(one, [blocks] * len(kinds))
    assert engine.told == []


def test_a_window_can_be_continued_from_where_it_is_whole():
    engine, blocks = Engine((FULL, SLIDING)), list(range(1, 20))
    assert engine.finish(turn(), [blocks, [0] * 14 + blocks[14:]])
    (kept,) = [one.kept for one in engine.keeper._turns.values()]
    assert (
        kept.min_prefix_tokens == 14 * BLOCK + WINDOW - 1
    )  # whose window begins with the first block that is there
    assert not Engine((FULL, SLIDING)).finish(turn(), [blocks, [0] * 18 + blocks[18:]])


def test_what_layers_that_see_everything_lack_cannot_be_kept():
    assert not Engine().finish(turn(), [[0, *range(2, 20)]])


def test_a_longer_turn_takes_the_place_of_a_shorter_and_another_does_not():
    engine = Engine()
    other = request("other", [*range(290), *range(9)], num_computed_tokens=298)
    engine.finish(turn("a"))
    engine.finish(other)
    assert engine.step() == []
    engine.finish(turn("b", tokens=400))
    assert engine.step() == ["a"]
    assert "b" in engine.keeper
    assert "other" in engine.keeper
    assert "a" not in engine.keeper


def test_the_oldest_give_way_when_there_are_too_many():
    engine = Engine(blocks=100, share=0.5)
    assert not engine.finish(turn("larger than all", tokens=900))
    for name in ("a", "b", "c"):
        assert engine.finish(turn(name, tokens=300, cache_salt=name))
    engine.pool.free_blocks_said = 100
    assert engine.step() == ["a"], "19 blocks each, 50 may be kept"
    assert engine.step() == []


def test_the_oldest_give_way_when_the_engine_needs_the_room():
    engine = Engine(blocks=160, share=1.0)
    for name in ("a", "b", "c"):
        engine.finish(turn(name, cache_salt=name))
    engine.pool.free_blocks_said = 10
    assert engine.step() == []
    engine.pool.free_blocks_said = 9
    assert engine.step() == ["a"]
    assert engine.step() == [], "what has been given up is on its way"
    engine.give_back("a")
    engine.pool.free_blocks_said = 0
    assert engine.step() == ["b"]
    assert len(engine.index) == 1


@pytest.mark.parametrize(
    ("kinds", "tokens", "wants"),
    [((FULL,), 1000, 64), ((FULL, SLIDING), 300, 40), ((FULL, SLIDING), 1000, 86)],
)
def test_they_give_way_to_a_request_that_waits_for_more_room_than_there_is(kinds, tokens, wants):
    engine = Engine(kinds, blocks=160, share=1.0)
    for name in ("a", "b"):
        engine.finish(turn(name, cache_salt=name))
    large = request("large", list(range(tokens)), needs_blocks=True)
    engine.wanted.add(large)
    engine.pool.free_blocks_said = wants
    assert engine.step() == []
    engine.pool.free_blocks_said = wants - 1
    assert engine.step() == ["a"]
    engine.give_back("a")
    large.needs_blocks = False
    engine.pool.free_blocks_said = 62
    assert engine.step() == []
    large.needs_blocks = True
    engine.wanted.remove(large)
    assert engine.step() == []


def test_its_blocks_are_pinned_until_all_workers_have_raised_the_word_and_the_engine_steps_for_that_alone():
    engine = Engine((FULL, SLIDING, STATE), workers=2)
    blocks = list(range(1, 20))
    assert not engine.keeper.busy
    engine.finish(turn(), [blocks, [0] * 14 + list(range(34, 39)), [*range(39, 57), 57]])
    assert (engine.pool.pinned, engine.keeper.busy) == (19 + 5 + 1, True), "of states the one that is offered"
    engine.step()
    engine.step()
    assert not engine.keeper.busy, "it is found"
    engine.keeper.give_up()
    assert engine.keeper.busy
    engine.step()
    assert (engine.pool.pinned, engine.keeper.busy, engine.keeper.holds_blocks) == (25, True, True)
    assert not engine.keeper.on_workers_confirmed("a", 1)
    assert not engine.keeper.on_workers_confirmed("never kept", 1)
    assert engine.pool.pinned == 25
    assert engine.keeper.on_workers_confirmed("a", 1)
    assert (engine.pool.pinned, engine.keeper.busy, engine.keeper.holds_blocks) == (0, False, False)


def test_without_a_slot_nothing_is_kept():
    engine = Engine()
    kept = [engine.finish(turn(str(n), cache_salt=str(n))) for n in range(9)]
    assert kept == [True] * 8 + [False]


def test_after_a_reset_all_go_and_what_comes_is_found_by_nobody():
    engine, one = Engine(), turn()
    engine.finish(one)
    engine.step()
    engine.step()
    content = engine.names.content(one, one.num_tokens)
    asked = AskTurn(0, CHUNK_TOKENS, list(content.keys))
    assert engine.index.find(asked).kept
    engine.names.start_anew()
    engine.keeper.give_up()
    assert engine.index.find(asked).kept == [], "nor until the next step"
    assert engine.step() == ["a"]
    engine.finish(turn("b"))
    engine.step()
    engine.step()
    names = TurnNames(Adapters())
    asked = names.content(one, one.num_tokens)
    assert engine.index.find(AskTurn(0, CHUNK_TOKENS, list(asked.keys))).kept == []
