"""Read packed cells: one lane's share of one route, segment by segment.

    staged      ASKED ─gathered─▶ READING ─done─▶ CHECKING ─word equal─▶ (scattered) over
    over-read                     READING ─done──────────────────────────▶ scattered  over
    any         ─refused, silent, no room─▶ the same cells go direct:  READING ─done─▶ over

A *segment* is a run of cells that move together. It holds an allocation of the source's outgoing area from
ASKED to CHECKING, and one of this worker's landing area from READING until it is scattered. A segment in
READING or CHECKING keeps both, because NIXL cannot cancel a READ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.planning.prepared_lists import DescriptorIndices
from kvferry.planning.select import Cells
from kvferry.transport.agent import Agent, ReadState
from kvferry.transport.gather_client import GatherClient
from kvferry.transport.gather_messages import Gathered
from kvferry.transport.lease import LeaseWord
from kvferry.transport.prepared_routes import PreparedMethod, PreparedRoute
from kvferry.transport.staging import Allocation, StagingArea

AHEAD = 4
"""Maximum number of segments of one route in progress."""

ASK_SECONDS = 5.0
"""Timeout for the source to gather a segment; after it the cells go direct."""

SILENT_SECONDS = 30.0
"""Pause before a source that timed out is asked again; any reply from it ends the pause."""

ROOM_SECONDS = 5.0
"""Maximum wait of a segment for landing memory, which late READs may hold; then its cells go direct."""


@dataclass(frozen=True, slots=True)
class PackedReadResources:
    """Resources that all packed reads of a lane share.

    Attributes:
        agent: the transport.
        landing: staging memory that images are read into.
        words: registered memory that words are read into, uint64.
        free_words: unused indices of `words`; a segment takes one before it reads gathered images.
    """

    agent: Agent
    landing: StagingArea
    words: npt.NDArray[np.uint64]
    free_words: list[int]


@dataclass(frozen=True, slots=True)
class RankLists:
    """Prepared lists of one rank of the peer.

    Attributes:
        local, remote: entries of cells and images.
        local_words, remote_words: the memory that words are read into, and the rank's words.
        incarnation: high half of the rank's words.
        area_words: indices of the words of the rank's outgoing area.
    """

    local: Any
    remote: Any
    local_words: Any
    remote_words: Any
    incarnation: int
    area_words: range = range(0)


class _SegmentState(Enum):
    NEW = "new"
    ASKED = "asked"
    GATHERED = "gathered"
    READING = "reading"
    CHECKING = "checking"


@dataclass(slots=True, eq=False)
class _Segment:
    cells: Cells
    state: _SegmentState
    since: float
    number: int = 0
    gathered: Gathered | None = None
    allocation: Allocation | None = None
    handle: Any = None
    word: int = -1
    direct: bool = False


def segments_of(method: PreparedMethod, cells: Cells) -> list[Cells]:
    """Split cells into segments."""
    per_chunk = method.segment_cells(len(cells))
    return [cells[at : at + per_chunk] for at in range(0, len(cells), per_chunk)]


class PackedRead:
    """Moves the packed cells of one route for one read. Only its lane's thread uses it.

    Attributes:
        failure: why the read has failed; None if it has not.
        peer_lost: True if the transport failed, so the source may be gone.
    """

    def __init__(
        self,
        bench: PackedReadResources,
        lists: RankLists,
        client: GatherClient | None,
        route: PreparedRoute,
        method: PreparedMethod,
        cells: Cells,
        lease: LeaseWord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        self.peer_lost = False
        self._bench, self._lists, self._client = bench, lists, client
        self._route, self._way, self._lease, self._clock = route, method, lease, clock
        self._rest = segments_of(method, cells)[::-1]
        self._chunks: list[_Segment] = []

    @property
    def finished(self) -> bool:
        """True if no segment is left or in flight."""
        return not self._chunks and (not self._rest or self.failure is not None)

    @property
    def waits_for_source(self) -> bool:
        """True if a segment waits for the source to gather it."""
        return any(segment.state is _SegmentState.ASKED for segment in self._chunks)

    @property
    def in_flight(self) -> bool:
        """True if a READ is in flight."""
        return any(segment.handle is not None for segment in self._chunks)

    def advance(self) -> bool:
        """Take every step that is possible now; return whether any was."""
        moved = self._ask_ahead()
        for segment in list(self._chunks):
            # As far as it gets, before another is looked at: what it frees, the source can use meanwhile.
            while segment in self._chunks and self._stepped(segment):
                moved = True
            moved |= self._ask_ahead()
        return moved

    def abandon(self, reason: str) -> None:
        """Fail the read: start no further segment, and wait for READs in flight."""
        self.failure = self.failure or reason

    # -- steps --------------------------------------------------------------------------------------------

    def _ask_ahead(self) -> bool:
        moved = False
        while self._rest and len(self._chunks) < AHEAD and self.failure is None:
            segment = _Segment(self._rest.pop(), _SegmentState.NEW, self._clock())
            self._chunks.append(segment)
            moved |= self._stepped(segment)
        return moved

    def _stepped(self, segment: _Segment) -> bool:
        """Take one step of a segment; return whether it was possible."""
        try:
            return self._step(segment)
        except Exception as error:  # noqa: BLE001 - a read fails alone
            self._fail(segment, f"the transport failed: {error}", peer_lost=True)
            return True

    def _begin(self, segment: _Segment) -> bool:
        if self._way.gather < 0:
            segment.state = _SegmentState.GATHERED
        elif self._source.is_silent(self._clock()):
            self._go_direct(segment, "it has not answered lately")
        else:
            cells = segment.cells
            segment.number = self._source.ask(
                self._way.gather, self._lease, cells.src_block, self._route.src_cell(cells)
            )
            segment.state = _SegmentState.ASKED
        return True

    @property
    def _source(self) -> GatherClient:
        assert self._client is not None  # noqa: S101 - there is one for whatever can be gathered
        return self._client

    def _step(self, segment: _Segment) -> bool:
        if segment.state is _SegmentState.NEW:
            return self._begin(segment)
        if segment.state is _SegmentState.ASKED:
            return self._handle_answer(segment)
        if segment.state is _SegmentState.GATHERED:
            return self._read(segment)
        state = self._bench.agent.state(segment.handle)
        if state is ReadState.IN_FLIGHT:
            return False
        self._bench.agent.release(segment.handle)
        if state is ReadState.FAILED:
            self._fail(segment, "the transport failed while reading", peer_lost=True)
        elif segment.state is _SegmentState.READING and segment.gathered is not None and not segment.direct:
            self._check(segment, segment.gathered)
        else:
            self._land(segment)
        return True

    def _handle_answer(self, segment: _Segment) -> bool:
        if self.failure is not None:
            self._over(segment)
            return True
        answer = self._source.answer(segment.number)
        if isinstance(answer, Gathered):
            if not self._is_sound(segment, answer):
                self._go_direct(segment, f"it names image {answer.position} and word {answer.word}")
            else:
                segment.gathered, segment.state, segment.since = answer, _SegmentState.GATHERED, self._clock()
        elif answer is not None:
            self._go_direct(segment, answer.reason)
        elif self._clock() - segment.since > ASK_SECONDS:
            self._source.silent_until = self._clock() + SILENT_SECONDS
            self._go_direct(segment, f"no answer within {ASK_SECONDS:g} s")
        else:
            return False
        return True

    def _is_sound(self, segment: _Segment, answer: Gathered) -> bool:
        """Return whether a reply names images and a word inside the outgoing area."""
        inside = answer.position + len(segment.cells) <= self._way.src.blocks
        return inside and answer.word in self._lists.area_words

    def _go_direct(self, segment: _Segment, reason: str) -> None:
        """Read the cells of a segment directly instead, with one descriptor per run."""
        if self._route.direct is None:
            self._fail(segment, f"cells that can only move packed were not packed: {reason}")
            return
        self._give_back(segment)
        segment.direct = True
        self._post(segment, self._route.direct_indices(segment.cells))

    def _read(self, segment: _Segment) -> bool:
        if self.failure is not None:
            self._over(segment)
            return True
        if not self._has_room(segment):
            if self._clock() - segment.since <= ROOM_SECONDS:
                return False
            self._go_direct(segment, f"no room to land for {ROOM_SECONDS:g} s")
            return True
        outgoing = segment.gathered.position if segment.gathered else 0
        self._post(
            segment,
            self._way.indices(
                segment.cells, outgoing, segment.allocation.position if segment.allocation else 0
            ),
        )
        return True

    def _has_room(self, segment: _Segment) -> bool:
        """Allocate the landing memory and word that this method needs; return False if there is none."""
        if segment.gathered is not None and segment.word < 0:
            if not self._bench.free_words:
                return False
            segment.word = self._bench.free_words.pop()
        if self._way.scatter is not None:
            segment.allocation = self._bench.landing.allocate(len(segment.cells), self._way.stride)
            return segment.allocation is not None
        return True

    def _post(self, segment: _Segment, indices: DescriptorIndices) -> None:
        agent = self._bench.agent
        segment.handle = agent.read(self._lists.local, indices.dst, self._lists.remote, indices.src)
        segment.state = _SegmentState.READING
        self._start(segment)

    def _check(self, segment: _Segment, gathered: Gathered) -> None:
        """Read the word of the source's allocation, now that the images have arrived."""
        expected = self._word(gathered)
        self._bench.words[segment.word] = ~np.uint64(expected)
        here, there = np.array([segment.word], np.int32), np.array([gathered.word], np.int32)
        segment.handle = self._bench.agent.read(
            self._lists.local_words, here, self._lists.remote_words, there
        )
        segment.state = _SegmentState.CHECKING
        self._start(segment)

    def _start(self, segment: _Segment) -> None:
        try:
            self._bench.agent.post(segment.handle)
        except Exception as error:  # noqa: BLE001 - the handle is polled, so that it is let go of only when it is over
            self.abandon(f"the transport failed: {error}")
            self.peer_lost = True

    def _word(self, gathered: Gathered) -> int:
        return self._lists.incarnation << 32 | gathered.generation

    def _land(self, segment: _Segment) -> None:
        gathered = segment.gathered if segment.state is _SegmentState.CHECKING else None
        if gathered and int(self._bench.words[segment.word]) != self._word(gathered):
            self._fail(segment, "the source used its staging area for others before it was read")
            return
        if segment.allocation is not None and self.failure is None:
            self._scatter(segment, segment.allocation)
        self._over(segment)

    def _scatter(self, segment: _Segment, allocation: Allocation) -> None:
        loops, cells = self._way.scatter, segment.cells
        assert loops is not None  # noqa: S101 - a lot was taken for it
        slots = self._bench.landing.images(self._way.stride)
        loops.scatter(cells.dst_block, cells.number, slots, allocation.position)

    def _fail(self, segment: _Segment, reason: str, *, peer_lost: bool = False) -> None:
        self.abandon(reason)
        self.peer_lost |= peer_lost
        self._over(segment)

    def _over(self, segment: _Segment) -> None:
        """Remove a segment, whose READs have ended."""
        self._chunks.remove(segment)
        self._give_back(segment)

    def _give_back(self, segment: _Segment) -> None:
        """Free all memory that a segment holds, on both sides."""
        if segment.number and self._client is not None:
            self._client.done(segment.number)
        if segment.allocation is not None:
            self._bench.landing.free(segment.allocation)
        if segment.word >= 0:
            self._bench.free_words.append(segment.word)
        segment.number, segment.allocation, segment.word = 0, None, -1
