"""Verify what a read brought: compare digests of the peer's blocks with digests of this worker's blocks.

    (the order is posted) ─▶ ASKED ─digest─▶ KNOWN ─its data has landed─▶ compared ─equal─▶ over
                               └─refused, silent─▶ over, not verified        └─unequal─▶ over, corrupt

A lane verifies its share of each route in segments. The peer's worker digests a segment's cells while READs
are in flight. When the segment has landed, the lane digests the same cells in its own blocks, so the method
by which they came does not matter, while later segments are in flight. The lease word is read after that: if
it is unchanged, the peer has digested the leased blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from kvferry.planning.select import Cells
from kvferry.transport.gather_client import Digested, NotGathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.prepared_routes import PreparedDigest
from kvferry.transport.segmented_read import SegmentedRead

# Maximum number of segments of a route for which the peer owes a digest.
AHEAD = 4

# A segment has about so many bytes, so that the lane's other reads and the peer's other readers go on.
SEGMENT_BYTES = 4 << 20

# Timeout in seconds for the peer's next digest, when its data has landed.
DIGEST_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Segment:
    cells: Cells
    end: int  # index of the cell after the last, among those of the read
    number: int  # id of the request
    digest: bytes | None = None  # the peer's; None if it is not known yet


class Verification:
    """The verification of a read: one lane's share of one route.

    Attributes:
        failure: why the data is not verified; None if no segment has failed.
        corrupt: whether the digests of a segment differ.
    """

    def __init__(self, clock: Callable[[], float], read: SegmentedRead, lease: LeaseWord) -> None:
        """Split the cells into segments. The route of `read` must have a digest, and its source a client."""
        assert read.route.digest is not None  # noqa: S101 - with the setting, all routes have one
        assert read.source.client is not None  # noqa: S101 - and the sources have clients
        self.failure: str | None = None
        self.corrupt = False
        self._clock, self._read, self._client, self._lease = clock, read, read.source.client, lease
        self._route, self._digest = read.route.route, read.route.digest
        self._rest: Iterator[Cells] = _segments(read.cells, self._digest)
        self._next = next(self._rest, None)
        self._asked = 0  # number of cells
        self._segments: deque[_Segment] = deque()  # in the order of the cells
        self._since = 0.0  # time since which the lane waits for the digest of landed data; 0 if it does not

    @property
    def finished(self) -> bool:
        return not self._segments and (self._next is None or self.failure is not None)

    @property
    def awaited(self) -> zmq.Socket[Any] | None:
        """Socket on which a digest of the peer will arrive; None if the peer owes none."""
        return self._client.socket if any(one.digest is None for one in self._segments) else None

    def ask_ahead(self) -> bool:
        """Ask for as many digests as the peer may owe; return whether any was asked for."""
        moved = False
        while self._next is not None and self.failure is None:
            if sum(one.digest is None for one in self._segments) >= AHEAD:
                break
            self._asked += len(self._next)
            self._segments.append(_Segment(self._next, self._asked, self._ask(self._next)))
            self._next, moved = next(self._rest, None), True
        return moved

    def advance(self) -> bool:
        """Take replies, and compare the segments that have landed; return whether there was any progress."""
        moved = self._take_answers()
        while self._has_landed and (digest := self._segments[0].digest) is not None:
            self._compare(self._segments.popleft().cells, digest)
            moved = True
        if not self._has_landed:
            self._since = 0.0
        elif moved or not self._since:
            self._since = self._clock()
        elif self._clock() - self._since > DIGEST_SECONDS:
            self.abandon(f"the peer's worker sent no digest within {DIGEST_SECONDS:g} s")
            moved = True
        return moved

    @property
    def _has_landed(self) -> bool:
        """Whether the data of the next segment to compare is in its blocks."""
        return bool(self._segments) and self._segments[0].end <= self._read.landed

    def abandon(self, reason: str) -> None:
        """Verify nothing more, for the first such reason."""
        self.failure = self.failure or reason
        for segment in self._segments:
            if segment.digest is None:
                self._client.done(segment.number)
        self._segments.clear()

    def _ask(self, cells: Cells) -> int:
        places = cells.src_number % self._route.src_cells
        route = self._digest.announced_route
        return self._client.ask(route, self._lease, cells.src_block, places, digest=True)

    def _take_answers(self) -> bool:
        moved = False
        for segment in list(self._segments):
            if segment.digest is not None or (answer := self._client.answer(segment.number)) is None:
                continue
            moved = True
            if isinstance(answer, Digested):
                segment.digest = answer.digest
            elif isinstance(answer, NotGathered) and answer.unknown:
                segment.number = self._ask(segment.cells)  # the client has announced the routes again
            else:
                why = answer.reason if isinstance(answer, NotGathered) else "it answered another question"
                self.abandon(f"the peer's worker sent no digest: {why}")
                break
        return moved

    def _compare(self, cells: Cells, digest: bytes) -> None:
        if self._digest.copies.digest(cells.dst_block, cells.dst_number, self._digest.stride) != digest:
            self.corrupt = True
            self.abandon(
                f"{self._named(cells)} arrived with other bytes than the peer holds (verify_transfers); look "
                "for a faulty network card, or faulty memory on either machine"
            )

    def _named(self, cells: Cells) -> str:
        first, *others = self._route.layers
        layers = f"{first} and {len(others)} more layers" if others else first
        if not (tokens := self._route.cell_tokens):
            return f"the recurrent state of {layers}"
        held = self._route.dst_interleave.held(int(cells.dst_number[-1]) + 1)
        low, high = int(held[cells.dst_number[0]]) * tokens, (int(held[-1]) + 1) * tokens
        return f"tokens {low} to {high} of {layers}"


def _segments(cells: Cells, digest: PreparedDigest) -> Iterator[Cells]:
    each = max(1, SEGMENT_BYTES // digest.stride)
    return (cells[at : at + each] for at in range(0, len(cells), each))
