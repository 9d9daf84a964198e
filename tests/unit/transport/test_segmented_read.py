"""One read's share of one route, step by step: transport, source and clock are the test's."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.geometry import Region
from kvferry.planning.prepared_lists import DescriptorIndices, PreparedEntries
from kvferry.planning.select import Cells
from kvferry.transport import segmented_read
from kvferry.transport.agent import ReadState
from kvferry.transport.gather_client import Gathered, NotGathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.prepared_routes import SourceRank
from kvferry.transport.segmented_read import (
    AHEAD,
    ASK_SECONDS,
    DIRECT_AHEAD,
    ROOM_SECONDS,
    SILENT_SECONDS,
    SegmentedRead,
)
from kvferry.transport.staging import UNIT_BYTES, LaneResources, StagingArea

STRIDE = UNIT_BYTES // 4
WORD = 5 << 32 | 9
LISTS = "here", "there", "our words", "its words"
CARD = SimpleNamespace(incarnation=5, leases=70, words=80)


@dataclass
class Transport:
    """READs end when they are told to."""

    words: np.ndarray
    posted: list[str] = field(default_factory=list)
    states: dict[int, ReadState] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    word: int = WORD
    refuses: str = ""
    post_fails: bool = False

    def transfer(self, operation, local, here, remote, there):
        assert operation == "READ"
        kind = "word" if local == "our words" else "direct" if there[0] >= 1000 else "images"
        if self.refuses == kind:
            raise RuntimeError("refused")
        if kind == "word":
            assert (remote, there.tolist()) == ("its words", [71])
            assert int(self.words[here[0]]) != WORD, "what was there before is no answer"
            self.words[here[0]] = self.word
        else:
            assert (local, remote) == ("here", "there")
        self.posted.append(kind)
        self.states[len(self.posted)] = ReadState.IN_FLIGHT
        return len(self.posted)

    def post(self, handle):
        if self.post_fails:
            raise RuntimeError("post failed")

    def state(self, handle):
        return self.states[handle]

    def release(self, handle):
        assert self.states[handle] is not ReadState.IN_FLIGHT
        self.released.append(handle)

    def end(self, state=ReadState.DONE):
        """All READs that are in flight end so."""
        for handle, found in self.states.items():
            if found is ReadState.IN_FLIGHT:
                self.states[handle] = state


@dataclass
class Source:
    asked: list[tuple[int, list[int], int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    answers: dict[int, object] = field(default_factory=dict)
    silent_until: float = 0.0
    fails: bool = False
    into_file: list[bool] = field(default_factory=list)
    socket: object = field(default_factory=object)

    def is_silent(self, now):
        return now < self.silent_until

    def ask(self, route, lease, blocks, cells, *, shared=False):
        if self.fails:
            raise RuntimeError("no such socket")
        self.asked.append((route, blocks.tolist(), cells.tolist()))
        self.into_file.append(shared)
        return len(self.asked)

    def answer(self, segment):
        return self.answers.pop(segment, None)

    def done(self, segment):
        assert segment not in self.ended, "said once"
        self.ended.append(segment)


class Table:
    """A read of some cells, and everything it touches."""

    def __init__(
        self, cells=2, src_cells=1, gathers=True, scatters=True, direct=True, per_segment=1, words=2,
        shared=None, stride=STRIDE,
    ):  # fmt: skip
        self.now = 100.0
        self.landing = StagingArea(4 * UNIT_BYTES, Region(0, 1))
        places = np.zeros(words, np.uint64)
        self.transport, self.source = Transport(places), Source()
        self.lane = LaneResources(
            self.transport, None, self.landing, places, None, list(range(words)), clock=lambda: self.now
        )
        self.scattered: list[tuple[list[int], list[int], int]] = []
        loops = SimpleNamespace(scatter=self._scatter)
        self.method = SimpleNamespace(
            announced_route=3 if gathers else -1, scatter=loops if scatters else None, stride=stride,
            shared=shared, src=PreparedEntries(0, 40), segments=lambda cells: [
                cells[at : at + per_segment] for at in range(0, len(cells), per_segment)
            ],
            indices=self._indices,
        )  # fmt: skip
        route = SimpleNamespace(
            direct=SimpleNamespace(indices=self._direct) if direct else None,
            route=SimpleNamespace(src_cells=src_cells),
        )
        self.indices: list[tuple[int, int]] = []
        ids = np.arange(1, cells + 1)
        source = SourceRank(CARD, "P", (), *LISTS, self.source if gathers else None, None, "")
        cells = Cells(ids, ids + 20, ids + 1, ids + 1)
        self.read = SegmentedRead(self.lane, source, route, self.method, cells, LeaseWord(0, 0, 1))

    def _scatter(self, blocks, cells, slots, first):
        self.scattered.append((blocks.tolist(), cells.tolist(), first))

    def _indices(self, cells, outgoing, landing):
        self.indices.append((outgoing, landing))
        return DescriptorIndices(np.arange(outgoing, outgoing + len(cells)), np.zeros(len(cells), np.int32))

    def _direct(self, cells, outgoing, landing):
        return DescriptorIndices(cells.src_block + 1000, cells.dst_block)

    def answer(self, reply=None):
        """Everything asked and not answered is gathered; or is answered so."""
        for segment in range(1, len(self.source.asked) + 1):
            if segment not in self.source.ended:
                self.source.answers.setdefault(segment, reply or Gathered(segment, 6, 71, 9))

    def run(self, times=3):
        for _ in range(times):
            self.read.advance()

    def gather(self, reply=None):
        """Chunks are asked for, answered, and taken as far as they get."""
        self.run()
        self.answer(reply)
        self.run()

    def land(self, state=ReadState.DONE):
        """READs in flight end so, and the read goes on."""
        self.transport.end(state)
        self.run()

    def is_lost(self, failure):
        """The peer is lost for this reason, and nothing was written or kept."""
        assert (self.read.failure, self.read.peer_lost, self.scattered) == (failure, True, [])
        return self.all_given_back()

    def all_given_back(self):
        assert self.read.finished
        assert self.landing.used_units == 0
        assert sorted(self.lane.free_words) == list(range(len(self.transport.words)))
        assert len(self.transport.released) == len(self.transport.posted)
        assert sorted(self.source.ended) == list(range(1, len(self.source.asked) + 1))
        return True


def test_a_staged_chunk_is_asked_for_read_checked_and_scattered():
    table = Table(cells=1)
    table.run()
    assert (table.source.asked, table.transport.posted) == ([(3, [1], [0])], [])
    assert table.read.awaited is table.source.socket
    assert not table.read.in_flight
    table.answer()
    table.run()
    assert table.transport.posted == ["images"]
    assert table.indices == [(6, 0)]
    assert table.read.awaited is None
    assert table.read.in_flight
    table.land()
    assert table.transport.posted == ["images", "word"]
    assert table.scattered == []
    assert table.source.ended == []
    table.land()
    assert table.scattered == [([21], [2], 0)]
    assert table.read.failure is None
    assert table.all_given_back()


def test_a_shared_chunk_is_asked_for_scattered_from_the_sources_area_and_checked():
    area = StagingArea(4 * UNIT_BYTES, Region(0, 1))
    table = Table(cells=1, shared=area)
    table.run()
    assert (table.source.asked, table.source.into_file) == ([(3, [1], [0])], [True])
    assert table.transport.posted == []
    table.answer()
    table.run()
    assert table.scattered == [([21], [2], 6)], "image 6, which the source names"
    assert table.transport.posted == ["word"]
    assert (table.landing.used_units, table.source.ended) == (0, [])
    table.land()
    assert table.scattered == [([21], [2], 6)]
    assert table.read.failure is None
    assert table.all_given_back()


def test_a_shared_chunk_whose_word_was_raised_is_a_failure():
    table = Table(cells=1, shared=StagingArea(4 * UNIT_BYTES, Region(0, 1)))
    table.transport.word = WORD + 1
    table.gather()
    table.land()
    assert "used its staging area for others" in table.read.failure
    assert table.all_given_back()


def test_an_over_read_chunk_is_read_and_scattered_without_asking():
    table = Table(cells=1, gathers=False)
    table.run()
    assert table.transport.posted == ["images"]
    assert table.scattered == []
    table.land()
    assert table.scattered == [([21], [2], 0)]
    assert table.read.failure is None
    assert table.all_given_back()


def test_a_chunk_that_is_read_into_place_takes_no_room_and_scatters_nothing():
    table = Table(cells=1, scatters=False)
    table.gather()
    assert table.landing.used_units == 0
    table.land()
    table.land()
    assert table.scattered == []
    assert table.read.failure is None
    assert table.all_given_back()


def test_a_word_that_was_raised_is_a_failure_and_nothing_is_scattered():
    table = Table(cells=1)
    table.transport.word = WORD + 1
    table.gather()
    table.land()
    table.land()
    assert "used its staging area for others" in table.read.failure
    assert not table.read.peer_lost
    assert table.scattered == []
    assert table.all_given_back()


def test_cells_are_asked_for_by_where_they_lie_in_their_blocks():
    table = Table(cells=5, src_cells=3, per_segment=3)
    table.run()
    assert table.source.asked == [(3, [1, 2, 3], [2, 0, 1]), (3, [4, 5], [2, 0])]
    table.answer()
    table.run()
    table.land()
    table.land()
    second = table.indices[1][1]
    assert table.scattered == [([21, 22, 23], [2, 3, 4], 0), ([24, 25], [5, 6], second)]
    assert table.all_given_back()


def test_cells_are_read_directly_in_segments_without_asking():
    table = Table(cells=3, gathers=False, scatters=False, stride=0)
    table.run()
    assert table.transport.posted == ["images"] * DIRECT_AHEAD, "so that they land one after the other"
    table.land()
    table.land()
    assert table.scattered == []
    assert table.read.failure is None
    assert table.all_given_back()


def test_cells_have_landed_up_to_the_first_segment_that_has_not():
    table = Table(cells=4, gathers=False, scatters=False, stride=0)
    assert table.read.landed == 0
    table.run()
    assert table.read.landed == 0
    first, second, *_ = table.transport.states
    table.transport.states[second] = ReadState.DONE
    table.run()
    assert table.read.landed == 0
    table.transport.states[first] = ReadState.DONE
    table.run()
    assert table.read.landed == 2
    table.land()
    table.land()
    assert table.read.landed == 4
    assert table.all_given_back()


def test_chunks_under_way_are_limited():
    table = Table(cells=AHEAD + 2, words=8)
    table.run()
    assert len(table.source.asked) == AHEAD
    table.answer()
    table.run()
    table.land()
    table.land()
    assert len(table.source.asked) == AHEAD + 2
    assert [blocks for _, blocks, _ in table.source.asked] == [[n] for n in range(1, AHEAD + 3)]


def test_every_look_takes_chunks_as_far_as_they_get_and_asks_for_more():
    table = Table(cells=AHEAD + 1, words=8)
    table.run()
    table.answer()
    table.read.advance()
    assert table.transport.posted == ["images"] * AHEAD
    table.transport.end()
    table.read.advance()
    table.transport.end()
    table.read.advance()
    assert len(table.source.asked) == AHEAD + 1


@pytest.mark.parametrize("direct", [True, False])
def test_cells_that_the_source_refuses_go_direct_or_fail_in_words(direct):
    table = Table(cells=1, direct=direct)
    table.gather(NotGathered(1, "too much"))
    assert table.source.ended == [1]
    table.land()
    assert table.transport.posted == ["direct"] * direct
    assert table.read.failure == (
        None if direct else "cells that can only move packed were not packed: too much"
    )
    assert table.scattered == []
    assert table.all_given_back()


@pytest.mark.parametrize("reply", [Gathered(1, 39, 71, 9), Gathered(1, 0, 69, 9), Gathered(1, 0, 80, 9)])
def test_an_answer_that_names_other_memory_is_not_followed(reply):
    table = Table(cells=2, per_segment=2)
    table.gather(reply)
    assert table.transport.posted == ["direct"]
    table.land()
    assert table.all_given_back()


def test_the_last_images_of_the_area_are_in_it():
    table = Table(cells=2, per_segment=2)
    table.gather(Gathered(1, 38, 71, 9))
    assert table.transport.posted == ["images"]


def test_a_source_that_does_not_answer_is_asked_no_more_for_a_while_and_everything_goes_direct():
    table = Table(cells=AHEAD + 3)
    table.run()
    table.now += ASK_SECONDS
    table.run()
    assert table.transport.posted == []
    table.now += 0.1
    table.run()
    assert table.transport.posted == ["direct"] * AHEAD
    assert table.source.silent_until == table.now + SILENT_SECONDS
    table.land()
    assert len(table.source.asked) == AHEAD
    assert table.transport.posted == ["direct"] * (AHEAD + 3)
    table.land()
    assert table.read.failure is None
    assert table.all_given_back()


@pytest.mark.parametrize("gathers", [True, False])
def test_chunks_wait_for_room_to_land_and_then_go_direct(gathers):
    table = Table(cells=1, gathers=gathers)
    other = table.landing.allocate(15, STRIDE)
    table.gather()
    assert table.transport.posted == []
    table.now += ROOM_SECONDS
    assert not table.read.advance()
    table.now += 0.1
    table.run()
    assert table.transport.posted == ["direct"]
    table.land()
    assert table.read.failure is None
    table.landing.free(other)
    assert table.all_given_back()


def test_chunks_that_get_room_in_time_are_read_through_it():
    table = Table(cells=1)
    other = table.landing.allocate(15, STRIDE)
    table.run()
    table.now += ASK_SECONDS
    table.answer()
    table.run()
    table.now += ROOM_SECONDS
    table.run()
    assert table.transport.posted == []
    table.landing.free(other)
    table.run()
    assert table.transport.posted == ["images"]


def test_no_room_is_a_failure_if_cells_cannot_go_direct():
    table = Table(cells=1, direct=False)
    other = table.landing.allocate(15, STRIDE)
    table.gather()
    table.now += ROOM_SECONDS + 1
    table.run()
    assert f"no room to land for {ROOM_SECONDS:g} s" in table.read.failure
    table.landing.free(other)
    assert table.all_given_back()


def test_with_few_places_for_words_chunks_take_turns():
    table = Table(cells=3, words=1)
    table.run()
    table.answer()
    for turn in range(1, 4):
        table.run()
        assert table.transport.posted.count("images") == turn
        table.land()
        assert table.transport.posted.count("word") == turn
        table.land()
    assert table.read.failure is None
    assert len(table.scattered) == 3
    assert table.all_given_back()


@pytest.mark.parametrize("kind", ["images", "word", "direct"])
def test_a_read_that_the_transport_does_not_take_is_a_failure_and_gives_everything_back(kind):
    table = Table(cells=1)
    table.transport.refuses = kind
    table.gather(NotGathered(1, "") if kind == "direct" else None)
    table.land()
    assert table.is_lost("the transport failed: refused")


@pytest.mark.parametrize("gathers", [True, False])
def test_a_read_that_fails_in_flight_is_a_failure_and_nothing_is_scattered(gathers):
    table = Table(cells=1, gathers=gathers)
    table.gather()
    table.land(ReadState.FAILED)
    assert table.is_lost("the transport failed while reading")


def test_a_peer_that_is_lost_stays_lost_whatever_fails_after_it():
    table = Table(cells=2)
    table.transport.word = WORD + 1
    table.run()
    table.source.answers[1] = Gathered(1, 6, 71, 9)
    table.run()
    table.land()
    assert table.transport.posted == ["images", "word"]
    table.source.answers[2] = Gathered(2, 7, 71, 9)
    table.run()
    table.transport.states[3] = ReadState.FAILED
    table.run()
    assert table.read.failure == "the transport failed while reading"
    table.land()
    assert table.read.peer_lost
    assert table.all_given_back()


def test_a_word_that_cannot_be_read_is_a_failure():
    table = Table(cells=1)
    table.gather()
    table.land()
    table.land(ReadState.FAILED)
    assert table.is_lost("the transport failed while reading")


def test_a_read_that_fails_while_it_is_posted_is_held_until_it_is_over():
    table = Table(cells=1, gathers=False)
    table.transport.post_fails = True
    table.run()
    assert table.read.failure == "the transport failed: post failed"
    assert table.read.peer_lost
    assert not table.read.finished
    assert table.landing.used_units
    table.land(ReadState.FAILED)
    assert table.all_given_back()


@pytest.mark.parametrize("ends", list(ReadState)[1:])
def test_abandoning_a_read_waits_for_segments_in_flight(ends):
    table = Table(cells=AHEAD + 2, words=8)
    table.run()
    table.source.answers[1] = Gathered(1, 6, 71, 9)
    table.run()
    table.read.abandon("given up")
    table.read.abandon("again")
    table.run()
    assert table.transport.posted == ["images"]
    assert not table.read.finished
    assert table.landing.used_units
    assert table.source.ended == [2, 3, 4]
    table.land(ends)
    table.land()
    assert table.read.failure == "given up"
    assert table.read.peer_lost is (ends is ReadState.FAILED)
    assert table.scattered == []
    assert len(table.source.asked) == AHEAD
    assert table.all_given_back()


def test_abandoning_a_read_drops_gathered_segments():
    table = Table(cells=1)
    other = table.landing.allocate(15, STRIDE)
    table.gather()
    table.read.abandon("given up")
    table.run()
    assert table.transport.posted == []
    table.landing.free(other)
    assert table.all_given_back()


def test_a_source_that_cannot_be_asked_is_a_failure():
    table = Table(cells=2)
    table.source.fails = True
    table.run()
    assert table.read.failure == "the transport failed: no such socket"
    assert table.read.peer_lost
    assert table.all_given_back()


def test_a_scatter_that_fails_is_a_failure():
    table = Table(cells=1, gathers=False)

    def failing(*_):
        raise RuntimeError("no such device")

    table.method.scatter.scatter = failing
    table.run()
    table.land()
    assert table.read.failure == "the transport failed: no such device"
    assert table.all_given_back()


def test_a_read_does_not_advance_while_its_segments_wait():
    table = Table(cells=1)
    assert table.read.advance()
    assert not table.read.advance()
    table.answer()
    table.run()
    assert not table.read.advance()
    assert segmented_read.ASK_SECONDS < segmented_read.SILENT_SECONDS
