"""The verification of one route's share, step by step: source, blocks and clock are the test's."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.geometry.interleave import NOT_INTERLEAVED
from kvferry.planning.select import Cells
from kvferry.transport import verification
from kvferry.transport.gather_client import Digested, Gathered, NotGathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.verification import AHEAD, DIGEST_SECONDS, SEGMENT_BYTES, Verification

LEASE = LeaseWord(3, 9, 1)


def digest_of(blocks: np.ndarray) -> bytes:
    return bytes(blocks.astype(np.uint8)).ljust(16, b".")


@dataclass
class Source:
    asked: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    answers: dict[int, object] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    socket: str = "the socket"

    def ask(self, route, lease, blocks, cells, *, digest):
        assert lease is LEASE
        self.asked.append((route, blocks.tolist(), cells.tolist()))
        return len(self.asked)

    def answer(self, number):
        return self.answers.pop(number, None)

    def done(self, number):
        self.left.append(number)

    def tell(self, *numbers: int) -> None:
        """Digest what these requests ask for, which are blocks 100 before the reader's."""
        for number in numbers:
            blocks = np.array(self.asked[number - 1][1]) + 100
            self.answers[number] = Digested(number, digest_of(blocks))


class Table:
    def __init__(self, cells: int, cell_tokens: int = 16, layers: tuple[str, ...] = ("a", "b")) -> None:
        self.now, self.source, self.digested = 50.0, Source(), list[list[int]]()
        copies = SimpleNamespace(digest=self._digest)
        route = SimpleNamespace(
            src_cells=3, cell_tokens=cell_tokens, layers=layers, dst_interleave=NOT_INTERLEAVED
        )
        digest = SimpleNamespace(announced_route=7, stride=SEGMENT_BYTES // 2, copies=copies)
        numbers = np.arange(4, 4 + cells)
        self.data = SimpleNamespace(
            source=SimpleNamespace(client=self.source),
            route=SimpleNamespace(route=route, digest=digest),
            cells=Cells(numbers + 10, numbers + 110, numbers, numbers),
            landed=0,
        )
        self.read = Verification(lambda: self.now, self.data, LEASE)
        self.spoiled: set[int] = set()

    def _digest(self, blocks: np.ndarray, numbers: np.ndarray, stride: int) -> bytes:
        assert stride == SEGMENT_BYTES // 2
        assert (blocks == numbers + 110).all()
        self.digested.append(numbers.tolist())
        found = digest_of(blocks)
        return found[::-1] if self.spoiled & {*numbers.tolist()} else found

    def run(self, *, landed: bool | int) -> None:
        """Advance as far as possible; so many cells have landed, or all of them, or none."""
        self.data.landed = len(self.data.cells) * landed if isinstance(landed, bool) else landed
        while self.read.ask_ahead() | self.read.advance():
            pass


def test_segments_are_compared_in_order_when_they_have_landed_and_not_before():
    table = Table(5)
    table.run(landed=False)
    assert table.source.asked == [(7, [14, 15], [1, 2]), (7, [16, 17], [0, 1]), (7, [18], [2])]
    table.source.tell(3, 1)
    table.run(landed=False)
    assert not table.digested
    assert table.read.awaited == "the socket"
    table.run(landed=True)
    assert table.digested == [[4, 5]], "the second digest is not known yet"
    table.source.tell(2)
    table.run(landed=True)
    assert table.digested == [[4, 5], [6, 7], [8]]
    assert table.read.finished
    assert (table.read.failure, table.read.corrupt, table.read.awaited) == (None, False, None)


def test_a_segment_is_compared_while_later_ones_are_in_flight():
    table = Table(6)
    table.run(landed=False)
    table.source.tell(1, 2, 3)
    for landed, digested in ((1, []), (2, [[4, 5]]), (3, [[4, 5]]), (5, [[4, 5], [6, 7]])):
        table.run(landed=landed)
        assert table.digested == digested
        assert not table.read.finished
    table.run(landed=6)
    assert table.digested == [[4, 5], [6, 7], [8, 9]]
    assert table.read.finished


def test_the_source_owes_no_more_digests_than_allowed_and_all_are_asked_while_data_is_read():
    table = Table(4 * AHEAD)
    table.run(landed=False)
    assert len(table.source.asked) == AHEAD
    for number in range(1, 2 * AHEAD + 1):
        table.source.tell(number)
        table.run(landed=False)
    assert len(table.source.asked) == 2 * AHEAD
    table.run(landed=True)
    assert table.read.finished


@pytest.mark.parametrize(
    ("cell_tokens", "layers", "named"),
    [
        (16, ("a", "b", "c"), "tokens 96 to 128 of a and 2 more layers arrived with other bytes"),
        (16, ("a",), "tokens 96 to 128 of a arrived with other bytes"),
        (0, ("a", "b"), "the recurrent state of a and 1 more layers arrived with other bytes"),
    ],
)
def test_digests_that_differ_are_corrupt_and_nothing_more_is_compared(cell_tokens, layers, named):
    table = Table(6, cell_tokens, layers)
    table.spoiled = {7}
    table.run(landed=False)
    table.source.tell(1, 2)
    table.run(landed=True)
    assert table.read.finished
    assert table.read.corrupt
    assert table.read.failure.startswith(named)
    assert len(table.digested) == 2
    assert table.source.left == [3]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (NotGathered(1, "the lease has ended"), "the peer's worker sent no digest: the lease has ended"),
        (Gathered(1, 0, 0, 0), "the peer's worker sent no digest: it answered another question"),
    ],
)
def test_a_refusal_leaves_the_data_unverified_and_not_corrupt(answer, why):
    table = Table(1)
    table.run(landed=False)
    table.source.answers[1] = answer
    table.run(landed=False)
    assert table.read.finished
    assert (table.read.failure, table.read.corrupt) == (why, False)


def test_a_source_that_has_forgotten_the_routes_is_asked_again():
    table = Table(1)
    table.run(landed=False)
    table.source.answers[1] = NotGathered(1, "who are you?", unknown=True)
    table.run(landed=False)
    assert table.source.asked == [(7, [14], [1])] * 2
    table.source.tell(2)
    table.run(landed=True)
    assert table.read.finished
    assert table.read.failure is None


def test_the_wait_for_a_digest_begins_when_its_data_has_landed_and_anew_with_each():
    table = Table(4)
    table.run(landed=False)
    table.now += 10 * DIGEST_SECONDS
    table.run(landed=1)
    table.now += 10 * DIGEST_SECONDS
    table.run(landed=True)
    assert not table.read.finished, "the read took its time"
    table.now += DIGEST_SECONDS
    table.source.tell(1)
    table.run(landed=True)
    table.now += DIGEST_SECONDS
    table.run(landed=True)
    assert not table.read.finished
    table.now += 0.1
    table.run(landed=True)
    assert table.read.finished
    assert (table.read.failure, table.read.corrupt) == ("the peer's worker sent no digest within 5 s", False)
    assert table.source.left == [2]


def test_a_read_that_has_failed_is_not_verified():
    table = Table(2 * AHEAD + 2)
    table.run(landed=False)
    table.source.tell(1)
    table.run(landed=False)
    table.read.abandon("the transport failed")
    assert table.read.finished
    assert table.source.left == [*range(2, AHEAD + 2)]
    assert not table.digested


def test_a_cell_larger_than_a_segment_is_one(monkeypatch):
    monkeypatch.setattr(verification, "SEGMENT_BYTES", 1)
    table = Table(2)
    table.run(landed=False)
    assert [blocks for _, blocks, _ in table.source.asked] == [[14], [15]]
