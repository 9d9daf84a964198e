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
    lot: Allocation | None = None
    handle: Any = None
    word: int = -1
    direct: bool = False


def segments_of(way: PreparedMethod, cells: Cells) -> list[Cells]:
    """Split cells into segments."""
    per_chunk = way.chunk_cells(len(cells))
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
        way: PreparedMethod,
        cells: Cells,
        lease: LeaseWord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        self.peer_lost = False
        self._bench, self._lists, self._client = bench, lists, client
        self._route, self._way, self._lease, self._clock = route, way, lease, clock
        self._rest = segments_of(way, cells)[::-1]
        self._chunks: list[_Segment] = []

    @property
    def finished(self) -> bool:
        """True if no segment is left or in flight."""
        return not self._chunks and (not self._rest or self.failure is not None)

    @property
    def waits_for_source(self) -> bool:
        """True if a segment waits for the source to gather it."""
        return any(chunk.state is _SegmentState.ASKED for chunk in self._chunks)

    @property
    def in_flight(self) -> bool:
        """True if a READ is in flight."""
        return any(chunk.handle is not None for chunk in self._chunks)

    def advance(self) -> bool:
        """Take every step that is possible now; return whether any was."""
        moved = self._ask_ahead()
        for chunk in list(self._chunks):
            # As far as it gets, before another is looked at: what it frees, the source can use meanwhile.
            while chunk in self._chunks and self._stepped(chunk):
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
            chunk = _Segment(self._rest.pop(), _SegmentState.NEW, self._clock())
            self._chunks.append(chunk)
            moved |= self._stepped(chunk)
        return moved

    def _stepped(self, chunk: _Segment) -> bool:
        """Take one step of a segment; return whether it was possible."""
        try:
            return self._step(chunk)
        except Exception as error:  # noqa: BLE001 - a read fails alone
            self._fail(chunk, f"the transport failed: {error}", peer_lost=True)
            return True

    def _begin(self, chunk: _Segment) -> bool:
        if self._way.gather < 0:
            chunk.state = _SegmentState.GATHERED
        elif self._source.is_silent(self._clock()):
            self._go_direct(chunk, "it has not answered lately")
        else:
            cells = chunk.cells
            chunk.number = self._source.ask(
                self._way.gather, self._lease, cells.src_block, self._route.src_cell(cells)
            )
            chunk.state = _SegmentState.ASKED
        return True

    @property
    def _source(self) -> GatherClient:
        assert self._client is not None  # noqa: S101 - there is one for whatever can be gathered
        return self._client

    def _step(self, chunk: _Segment) -> bool:
        if chunk.state is _SegmentState.NEW:
            return self._begin(chunk)
        if chunk.state is _SegmentState.ASKED:
            return self._handle_answer(chunk)
        if chunk.state is _SegmentState.GATHERED:
            return self._read(chunk)
        state = self._bench.agent.state(chunk.handle)
        if state is ReadState.IN_FLIGHT:
            return False
        self._bench.agent.release(chunk.handle)
        if state is ReadState.FAILED:
            self._fail(chunk, "the transport failed while reading", peer_lost=True)
        elif chunk.state is _SegmentState.READING and chunk.gathered is not None and not chunk.direct:
            self._check(chunk, chunk.gathered)
        else:
            self._land(chunk)
        return True

    def _handle_answer(self, chunk: _Segment) -> bool:
        if self.failure is not None:
            self._over(chunk)
            return True
        answer = self._source.answer(chunk.number)
        if isinstance(answer, Gathered):
            if not self._is_sound(chunk, answer):
                self._go_direct(chunk, f"it names image {answer.position} and word {answer.word}")
            else:
                chunk.gathered, chunk.state, chunk.since = answer, _SegmentState.GATHERED, self._clock()
        elif answer is not None:
            self._go_direct(chunk, answer.reason)
        elif self._clock() - chunk.since > ASK_SECONDS:
            self._source.silent_until = self._clock() + SILENT_SECONDS
            self._go_direct(chunk, f"no answer within {ASK_SECONDS:g} s")
        else:
            return False
        return True

    def _is_sound(self, chunk: _Segment, answer: Gathered) -> bool:
        """Return whether a reply names images and a word inside the outgoing area."""
        inside = answer.position + len(chunk.cells) <= self._way.src.blocks
        return inside and answer.word in self._lists.area_words

    def _go_direct(self, chunk: _Segment, reason: str) -> None:
        """Read the cells of a segment directly instead, with one descriptor per run."""
        if self._route.direct is None:
            self._fail(chunk, f"cells that can only move packed were not packed: {reason}")
            return
        self._give_back(chunk)
        chunk.direct = True
        self._post(chunk, self._route.direct_indices(chunk.cells))

    def _read(self, chunk: _Segment) -> bool:
        if self.failure is not None:
            self._over(chunk)
            return True
        if not self._has_room(chunk):
            if self._clock() - chunk.since <= ROOM_SECONDS:
                return False
            self._go_direct(chunk, f"no room to land for {ROOM_SECONDS:g} s")
            return True
        outgoing = chunk.gathered.position if chunk.gathered else 0
        self._post(chunk, self._way.indices(chunk.cells, outgoing, chunk.lot.position if chunk.lot else 0))
        return True

    def _has_room(self, chunk: _Segment) -> bool:
        """Allocate the landing memory and word that this method needs; return False if there is none."""
        if chunk.gathered is not None and chunk.word < 0:
            if not self._bench.free_words:
                return False
            chunk.word = self._bench.free_words.pop()
        if self._way.scatter is not None:
            chunk.lot = self._bench.landing.allocate(len(chunk.cells), self._way.stride)
            return chunk.lot is not None
        return True

    def _post(self, chunk: _Segment, indices: DescriptorIndices) -> None:
        agent = self._bench.agent
        chunk.handle = agent.read(self._lists.local, indices.dst, self._lists.remote, indices.src)
        chunk.state = _SegmentState.READING
        self._start(chunk)

    def _check(self, chunk: _Segment, gathered: Gathered) -> None:
        """Read the word of the source's allocation, now that the images have arrived."""
        expected = self._word(gathered)
        self._bench.words[chunk.word] = ~np.uint64(expected)
        here, there = np.array([chunk.word], np.int32), np.array([gathered.word], np.int32)
        chunk.handle = self._bench.agent.read(self._lists.local_words, here, self._lists.remote_words, there)
        chunk.state = _SegmentState.CHECKING
        self._start(chunk)

    def _start(self, chunk: _Segment) -> None:
        try:
            self._bench.agent.post(chunk.handle)
        except Exception as error:  # noqa: BLE001 - the handle is polled, so that it is let go of only when it is over
            self.abandon(f"the transport failed: {error}")
            self.peer_lost = True

    def _word(self, gathered: Gathered) -> int:
        return self._lists.incarnation << 32 | gathered.generation

    def _land(self, chunk: _Segment) -> None:
        gathered = chunk.gathered if chunk.state is _SegmentState.CHECKING else None
        if gathered and int(self._bench.words[chunk.word]) != self._word(gathered):
            self._fail(chunk, "the source used its staging area for others before it was read")
            return
        if chunk.lot is not None and self.failure is None:
            self._scatter(chunk, chunk.lot)
        self._over(chunk)

    def _scatter(self, chunk: _Segment, lot: Allocation) -> None:
        loops, cells = self._way.scatter, chunk.cells
        assert loops is not None  # noqa: S101 - a lot was taken for it
        slots = self._bench.landing.images(self._way.stride)
        loops.scatter(cells.dst_block, cells.number, slots, lot.position)

    def _fail(self, chunk: _Segment, reason: str, *, peer_lost: bool = False) -> None:
        self.abandon(reason)
        self.peer_lost |= peer_lost
        self._over(chunk)

    def _over(self, chunk: _Segment) -> None:
        """Remove a segment, whose READs have ended."""
        self._chunks.remove(chunk)
        self._give_back(chunk)

    def _give_back(self, chunk: _Segment) -> None:
        """Free all memory that a segment holds, on both sides."""
        if chunk.number and self._client is not None:
            self._client.done(chunk.number)
        if chunk.lot is not None:
            self._bench.landing.free(chunk.lot)
        if chunk.word >= 0:
            self._bench.free_words.append(chunk.word)
        chunk.number, chunk.lot, chunk.word = 0, None, -1
