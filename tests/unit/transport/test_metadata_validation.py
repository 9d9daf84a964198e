"""Peers' metadata is loaded only after a child process has passed it; what the child does is made up here."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvferry.geometry import Region
from kvferry.transport.messages import Outgoing
from kvferry.transport.metadata_validation import MAX_TRIALS, REFUSED_SECONDS, MetadataValidator
from support.clock import Clock
from support.metadata import row, written
from transport.cards import cards


class Child:
    def __init__(self, world) -> None:
        self.world, self.ended = world, False

    def wait_ready(self) -> str:
        self.world.clock.now += self.world.starts
        return self.world.unready

    def run_trial(self, card, seconds: float) -> str:
        self.world.tried.append(card.incarnation)
        self.world.clock.now += self.world.takes
        if self.world.fails is not None:
            raise self.world.fails
        return self.world.says if seconds > 0 else "late"

    def kill(self) -> None:
        self.ended = True


class World:
    def __init__(self, **options) -> None:
        self.children, self.tried, self.says, self.unready, self.takes = [], [], "", "", 0.0
        self.starts, self.full = 0.0, False
        self.fails, self.clock = None, Clock()
        self.validator = MetadataValidator(self.start, self.clock, **options)

    def start(self) -> Child:
        if self.full:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.children.append(Child(self))
        return self.children[-1]

    def verdict(self, *asked) -> str:
        return self.validator.validate(asked).result(10)


def card(number: int = 1, **changes):
    """Make a card whose metadata registers two places for lease words."""
    (one,) = cards()
    words = Region(one.words_address, 8 * one.words)
    regions = [*one.geometry.regions, words, replace(words, address=elsewhere(one))]
    one = msgspec.structs.replace(one, agent=written([row(r) for r in regions]), incarnation=number)
    return msgspec.structs.replace(one, **changes)


def elsewhere(one) -> int:
    return one.words_address + (1 << 20)


@pytest.fixture
def world():
    made = World()
    yield made
    made.validator.close()


def test_metadata_that_has_passed_is_not_tried_again(world):
    assert [world.verdict(card()) for _ in range(3)] == ["", "", ""]
    assert world.verdict(card(), card(2)) == ""
    assert (world.tried, len(world.children)) == ([1, 2], 1)


@pytest.mark.parametrize("of", ["words", "run", "agent"])
def test_another_question_to_the_child_is_tried_again(world, of):
    one = card()
    other = {
        "words": card(words_address=elsewhere(one)),
        "run": card(2),
        "agent": card(agent=one.agent.replace(b"some address", b"same address")),
    }[of]
    assert [world.verdict(one), world.verdict(other), world.verdict(other)] == ["", "", ""]
    assert world.tried == [1, other.incarnation]


@pytest.mark.parametrize("lie", ["words", "regions", "outgoing"])
def test_metadata_that_has_passed_covers_no_other_claim(world, lie):
    one = card()
    assert world.verdict(one) == ""
    (region, *others) = one.geometry.regions
    wider = replace(one.geometry, regions=(replace(region, length=region.length + 1), *others))
    lies = {
        "words": {"words": one.words + 1},
        "regions": {"geometry": wider},
        "outgoing": {"outgoing": Outgoing("h", 1, 1 << 45, 1 << 20, 1)},
    }
    assert "does not register" in world.verdict(card(**lies[lie]))


def test_so_many_that_have_passed_are_remembered_and_the_oldest_is_tried_again():
    world = World(max_passed=2)
    assert [world.verdict(card(number)) for number in (1, 2, 3, 3, 2, 1)] == [""] * 6
    assert world.tried == [1, 2, 3, 1]
    world.validator.close()


def test_an_unexpected_error_refuses_one_peer_and_the_next_is_tried(world, caplog):
    world.fails = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "nobody expects this")
    assert "cannot be tried: " in world.verdict(card())
    assert "nobody expects this" in caplog.text
    world.fails = None
    assert world.verdict(card()) == ""


def test_a_refusal_replaces_the_child_and_stands_for_all_lanes(world):
    world.says = "signal 11"
    assert [world.verdict(card()) for _ in range(2)] == ["signal 11"] * 2
    assert world.tried == [1]
    assert [child.ended for child in world.children] == [True, False]
    world.clock.now += REFUSED_SECONDS
    world.says = ""
    assert world.verdict(card()) == ""
    assert world.tried == [1, 1]


def test_a_refusal_stands_for_all_lanes_however_long_the_next_child_takes_to_start(world):
    world.says, world.starts = "it hangs", 3 * REFUSED_SECONDS
    assert [world.verdict(card()) for _ in range(2)] == ["it hangs"] * 2
    assert world.tried == [1]


def test_one_bad_rank_refuses_the_peer_and_the_rest_is_not_tried(world):
    world.says = "signal 6"
    assert world.verdict(card(1), card(2)) == "signal 6"
    assert world.tried == [1]


def test_metadata_out_of_bounds_is_refused_without_a_child(world):
    bad = msgspec.structs.replace(card(), agent=b"nonsense")
    assert "expected NIXL's" in world.verdict(card(1), bad)
    assert (world.children, world.tried) == ([], [])


def test_ranks_of_a_peer_share_the_time(world):
    world.takes = 6.0
    assert world.verdict(card(1), card(2), card(3)) == "late"


def test_a_child_that_does_not_start_is_a_refusal_and_another_is_started(world):
    world.unready = "it did not start"
    assert world.verdict(card()) == "it did not start"
    assert [child.ended for child in world.children] == [True, False]
    world.unready = ""
    world.clock.now += REFUSED_SECONDS
    assert world.verdict(card()) == ""


def test_a_machine_without_room_for_a_process_refuses_in_words(world, caplog):
    world.full = True
    assert world.verdict(card()).startswith("the process that tries transport metadata cannot be started")
    assert "temporarily unavailable" in caplog.text


def test_a_child_is_replaced_after_many_trials(world):
    assert {world.verdict(card(number)) for number in range(1, MAX_TRIALS + 2)} == {""}
    assert [child.ended for child in world.children] == [True, False]


def test_warming_up_starts_the_child_and_closing_ends_it(world):
    world.validator.warm_up()
    world.validator.close()
    (child,) = world.children
    assert child.ended
