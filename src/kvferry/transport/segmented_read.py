"""Read one lane's share of one route, segment by segment: packed cells, and all cells that are verified.

Cells whose bytes are scattered in short runs move as *images*. *Staged*: the source gathers cells into images
in its staging area, on request. *Over-read*: the reader fetches contiguous ranges of the source's blocks,
gaps included. *Shared*: the source gathers into its outgoing file, which the reader has mapped and scatters
from (`staging`).

    staged      ASKED ─gathered─▶ READING ─done─▶ CHECKING ─word equal─▶ (scattered) over
    shared      ASKED ─gathered─▶ scattered ────▶ CHECKING ─word equal─▶ over
    over-read                     READING ─done──────────────────────────▶ scattered  over
    direct                        READING ─done─▶ over
    any         ─refused, silent, no room─▶ the same cells go direct:  READING ─done─▶ over

A *segment* is a run of cells that move together. A staged segment holds memory of the source's staging area
from ASKED to CHECKING, and the word read in CHECKING has changed if that memory was reused. A segment whose
images must be unpacked holds memory of the landing area from READING until it is scattered. During READING
and CHECKING a segment keeps all its memory, because NIXL cannot cancel a READ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import zmq

from kvferry.planning.prepared_lists import DescriptorIndices
from kvferry.planning.select import Cells
from kvferry.transport.agent import ReadState
from kvferry.transport.gather_client import GatherClient, Gathered, NotGathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.prepared_routes import PreparedMethod, PreparedRoute, SourceRank
from kvferry.transport.staging import Allocation, LaneResources, StagingArea

AHEAD = 4  # maximum number of segments of a route that are in progress at a time

# The same of segments that go straight into blocks. A transport serves READs in flight in turns, so they land
# together, and are verified after that.
DIRECT_AHEAD = 2

# Timeout in seconds for the source to gather a segment. After it, the cells are read without packing.
ASK_SECONDS = 5.0

# Seconds for which a source that timed out is not asked again. Any reply from it ends this time.
SILENT_SECONDS = 30.0

# Maximum seconds that a segment waits for landing memory or a free word of this lane. After that, its cells
# are read without packing.
ROOM_SECONDS = 5.0


class _SegmentState(Enum):
    NEW = "new"
    ASKED = "asked"
    GATHERED = "gathered"
    READING = "reading"
    CHECKING = "checking"


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of cells that move together."""

    first: int  # index of the first of them among the cells of the read
    cells: Cells
    state: _SegmentState
    since: float  # start of the current timeout: creation, or arrival of the source's reply
    number: int = 0  # id of the request to gather; 0 for none
    gathered: Gathered | None = None
    allocation: Allocation | None = None  # memory of the landing area
    handle: Any = None  # latest READ
    word: int = -1  # index in `LaneResources.words` for the source's word; -1 for none
    direct: bool = False  # the cells are read straight into blocks instead


class SegmentedRead:
    """A read of cells in segments."""

    def __init__(
        self,
        lane: LaneResources,
        source: SourceRank,
        route: PreparedRoute,
        method: PreparedMethod,
        cells: Cells,
        lease: LeaseWord,
    ) -> None:
        """Split the cells into segments. `advance` reads them by a `method` of `route`."""
        self.failure: str | None = None
        self.peer_lost = False
        self._lane, self._agent, self._clock = lane, lane.agent, lane.clock
        self.source, self._lease = source, lease
        self.route, self.method = route, method
        self.cells = cells
        self._rest = iter(method.segments(cells))
        self._next = next(self._rest, None)  # cells of the segment to begin next
        self._begun = 0  # number of cells in segments that have begun
        self._ahead = AHEAD if method.stride else DIRECT_AHEAD
        self._segments: list[_Segment] = []

    @property
    def finished(self) -> bool:
        return not self._segments and (self._next is None or self.failure is not None)

    @property
    def landed(self) -> int:
        """Number of cells, from the first on, that are all in their blocks."""
        return min((segment.first for segment in self._segments), default=self._begun)

    @property
    def awaited(self) -> zmq.Socket[Any] | None:
        """Socket on which a reply of the source will arrive; None if the source owes no reply."""
        asked = any(segment.state is _SegmentState.ASKED for segment in self._segments)
        return self._client.socket if asked else None

    @property
    def in_flight(self) -> bool:
        return any(segment.handle is not None for segment in self._segments)

    def advance(self) -> bool:
        """Advance as far as possible without blocking; return whether there was any progress."""
        moved = self._ask_ahead()
        for segment in list(self._segments):
            # Advance this segment as far as possible before the next, so the source can reuse its memory.
            while segment in self._segments and self._try_step(segment):
                moved = True
            moved |= self._ask_ahead()
        return moved

    def abandon(self, reason: str) -> None:
        """Read no further cells, for the first such reason. READs in flight continue until `finished`."""
        self.failure = self.failure or reason

    # -- steps --------------------------------------------------------------------------------------------

    def _ask_ahead(self) -> bool:
        moved = False
        while self._next is not None and len(self._segments) < self._ahead and self.failure is None:
            segment = _Segment(self._begun, self._next, _SegmentState.NEW, self._clock())
            self._begun += len(self._next)
            self._next = next(self._rest, None)
            self._segments.append(segment)
            moved |= self._try_step(segment)
        return moved

    def _try_step(self, segment: _Segment) -> bool:
        try:
            return self._step(segment)
        except Exception as error:  # noqa: BLE001 - only this read fails
            self._fail(segment, f"the transport failed: {error}", peer_lost=True)
            return True

    def _step(self, segment: _Segment) -> bool:
        if segment.state is _SegmentState.NEW:
            return self._begin(segment)
        if segment.state in (_SegmentState.ASKED, _SegmentState.GATHERED):
            if self.failure is not None:
                self._remove_segment(segment)
                return True
            asked = segment.state is _SegmentState.ASKED
            return self._handle_answer(segment) if asked else self._read(segment)
        state = self._agent.state(segment.handle)
        if state is ReadState.IN_FLIGHT:
            return False
        self._agent.release(segment.handle)
        if state is ReadState.FAILED:
            self._fail(segment, "the transport failed while reading", peer_lost=True)
        elif segment.state is _SegmentState.READING and segment.gathered is not None and not segment.direct:
            self._check(segment, segment.gathered)
        else:
            self._land(segment)
        return True

    @property
    def _client(self) -> GatherClient:
        assert self.source.client is not None  # noqa: S101 - methods that gather have a client
        return self.source.client

    def _begin(self, segment: _Segment) -> bool:
        if self.method.announced_route < 0:
            segment.state = _SegmentState.GATHERED
        elif self._client.is_silent(self._clock()):
            self._read_unpacked(segment, "it has not answered lately")
        else:
            cells, shared = segment.cells, self.method.shared is not None
            places = cells.src_number % self.route.route.src_cells
            segment.number = self._client.ask(
                self.method.announced_route, self._lease, cells.src_block, places, shared=shared
            )
            segment.state = _SegmentState.ASKED
        return True

    def _handle_answer(self, segment: _Segment) -> bool:
        answer, card = self._client.answer(segment.number), self.source.card
        if isinstance(answer, Gathered):
            # The peer may name any image and any word, also those of leases.
            inside = answer.position + len(segment.cells) <= self.method.src.blocks
            if inside and card.leases <= answer.word < card.words:
                segment.gathered, segment.state, segment.since = answer, _SegmentState.GATHERED, self._clock()
            else:
                self._read_unpacked(segment, f"it names image {answer.position} and word {answer.word}")
        elif isinstance(answer, NotGathered):
            self._read_unpacked(segment, answer.reason)
        elif answer is not None:
            self._read_unpacked(segment, "it answered another question")
        elif self._clock() - segment.since > ASK_SECONDS:
            self._client.silent_until = self._clock() + SILENT_SECONDS
            self._read_unpacked(segment, f"no answer within {ASK_SECONDS:g} s")
        else:
            return False
        return True

    def _read_unpacked(self, segment: _Segment, reason: str) -> None:
        if (method := self.route.direct) is None:  # it would need too many descriptors
            self._fail(segment, f"cells that can only move packed were not packed: {reason}")
            return
        self._free_segment(segment)
        segment.direct = True
        self._read_cells(segment, method.indices(segment.cells, 0, 0))

    def _read(self, segment: _Segment) -> bool:
        if not self._has_room(segment):
            if self._clock() - segment.since <= ROOM_SECONDS:
                return False
            self._read_unpacked(segment, f"no room to land for {ROOM_SECONDS:g} s")
            return True
        outgoing = segment.gathered.position if segment.gathered else 0
        if segment.gathered is not None and self.method.shared is not None:
            # The word is read after the copy: if it is unchanged, the images were valid all the time.
            self._scatter(segment, self.method.shared, outgoing)
            self._check(segment, segment.gathered)
            return True
        landing = segment.allocation.position if segment.allocation else 0
        self._read_cells(segment, self.method.indices(segment.cells, outgoing, landing))
        return True

    def _has_room(self, segment: _Segment) -> bool:
        """Allocate the word and the landing memory that a segment needs; return whether it has both."""
        if segment.gathered is not None and segment.word < 0:
            if not self._lane.free_words:
                return False
            segment.word = self._lane.free_words.pop()
        if self.method.scatter is not None and self.method.shared is None:
            segment.allocation = self._lane.landing.allocate(len(segment.cells), self.method.stride)
            return segment.allocation is not None
        return True

    def _read_cells(self, segment: _Segment, indices: DescriptorIndices) -> None:
        source = self.source
        segment.handle = self._agent.transfer("READ", source.local, indices.dst, source.remote, indices.src)
        segment.state = _SegmentState.READING
        self._post(segment)

    def _check(self, segment: _Segment, gathered: Gathered) -> None:
        """Start to read the source's word, which shows whether the images that have arrived are valid."""
        # If nothing arrives here, the old content must not pass for the word.
        self._lane.words[segment.word] = ~np.uint64(self._word(gathered))
        here, there = np.array([segment.word], np.int32), np.array([gathered.word], np.int32)
        words, remote = self.source.local_words, self.source.remote_words
        segment.handle = self._agent.transfer("READ", words, here, remote, there)
        segment.state = _SegmentState.CHECKING
        self._post(segment)

    def _post(self, segment: _Segment) -> None:
        try:
            self._agent.post(segment.handle)
        except Exception as error:  # noqa: BLE001 - the handle is polled until the READ has ended
            self.abandon(f"the transport failed: {error}")
            self.peer_lost = True

    def _word(self, gathered: Gathered) -> int:
        return self.source.card.incarnation << 32 | gathered.generation

    def _land(self, segment: _Segment) -> None:
        gathered = segment.gathered if segment.state is _SegmentState.CHECKING else None
        if gathered and int(self._lane.words[segment.word]) != self._word(gathered):
            self._fail(segment, "the source used its staging area for others before it was read")
            return
        if segment.allocation is not None and self.failure is None:
            self._scatter(segment, self._lane.landing, segment.allocation.position)
        self._remove_segment(segment)

    def _scatter(self, segment: _Segment, area: StagingArea, first: int) -> None:
        copies, cells = self.method.scatter, segment.cells
        assert copies is not None  # noqa: S101 - only a method that scatters has images to unpack
        copies.scatter(cells.dst_block, cells.dst_number, area.images(self.method.stride), first)

    def _fail(self, segment: _Segment, reason: str, *, peer_lost: bool = False) -> None:
        self.abandon(reason)
        self.peer_lost |= peer_lost
        self._remove_segment(segment)

    def _remove_segment(self, segment: _Segment) -> None:
        """Remove a segment, and free all that it holds. None of its READs may be in flight."""
        self._segments.remove(segment)
        self._free_segment(segment)

    def _free_segment(self, segment: _Segment) -> None:
        if segment.number:
            self._client.done(segment.number)
        if segment.allocation is not None:
            self._lane.landing.free(segment.allocation)
        if segment.word >= 0:
            self._lane.free_words.append(segment.word)
        segment.number, segment.allocation, segment.word = 0, None, -1
