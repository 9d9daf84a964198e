"""Read packed cells: one lane's share of one route, segment by segment.

A cell is the unit of transfer: the largest number of tokens that divides the block sizes of both sides. If
its bytes are scattered in short runs, it is packed into an *image*: contiguous memory. There are two ways.
*Staged*: the source gathers cells into images in its staging area, on request. *Over-read*: the reader
fetches contiguous ranges of the source's blocks, gaps included. If the reader has mapped the source's
outgoing file (`shared_area`), the source gathers into it, and the reader scatters from there (*shared*).

    staged      ASKED ─gathered─▶ READING ─done─▶ CHECKING ─word equal─▶ (scattered) over
    shared      ASKED ─gathered─▶ scattered ────▶ CHECKING ─word equal─▶ over
    over-read                     READING ─done──────────────────────────▶ scattered  over
    any         ─refused, silent, no room─▶ the same cells go direct:  READING ─done─▶ over

A *segment* is a run of cells that move together. A staged segment holds memory of the source's staging area
from ASKED to CHECKING. In CHECKING the lane reads a word in the source's registered memory, which has changed
if that memory was reused. A segment whose images must be unpacked holds memory of this worker's staging area
from READING until it is scattered into blocks. During READING and CHECKING a segment keeps all its memory,
because NIXL cannot cancel a READ.
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
from kvferry.transport.shared_area import MappedArea
from kvferry.transport.staging import Allocation, StagingArea

AHEAD = 4
"""Maximum number of segments of a route that are in progress at a time."""

ASK_SECONDS = 5.0
"""Timeout in seconds for the source to gather a segment. After it, the cells are read without packing."""

SILENT_SECONDS = 30.0
"""Seconds for which a source that timed out is not asked again. Any reply from it ends this time."""

ROOM_SECONDS = 5.0
"""Maximum seconds that a segment waits for staging memory or a free word of this lane.

After that, its cells are read without packing.
"""


@dataclass(frozen=True, slots=True)
class PackedReadResources:
    """Resources that are shared by all reads of packed cells of one lane (reading thread).

    A cell is the part of a block that moves as one unit. An image is a cell packed into contiguous memory. A
    word is an integer in the source's memory that shows whether images are valid.

    Attributes:
        agent: NIXL agent of the lane.
        landing: staging area that images are read into.
        words: registered memory of this lane into which words of the source are read, uint64 of shape (n,).
        free_words: indices of the elements of `words` that no read is using.
    """

    agent: Agent
    landing: StagingArea
    words: npt.NDArray[np.uint64]
    free_words: list[int]


@dataclass(frozen=True, slots=True)
class RankLists:
    """Prepared NIXL descriptor lists for reading from one rank of the peer.

    The rank keeps *words* (64-bit values) in registered memory. A word changes when the memory that it
    belongs to is reused, so the reader can check afterwards whether the bytes that it read were valid. A cell
    is the part of a block that moves as one unit. An image is a cell packed into contiguous memory.

    Attributes:
        local: handle of the list of local memory: cells in blocks, and images in the staging area. None if
            the rank supplies no KV.
        remote: handle of the list of the rank's memory: cells in blocks, and images in its staging area. None
            if the rank supplies no KV.
        local_words: handle of the list of local memory that the rank's words are read into.
        remote_words: handle of the list of the rank's words.
        incarnation: random number that the rank chose at its start; the high half of each of its words.
        area_words: indices of the words that belong to the rank's staging area.
    """

    local: Any
    remote: Any
    local_words: Any
    remote_words: Any
    incarnation: int
    area_words: range = range(0)


class _SegmentState(Enum):
    """State of a segment: a run of packed cells (parts of blocks) that move together.

    NEW: nothing has been done. ASKED: the source has been asked to pack the cells. GATHERED: the cells can be
    read. READING: the cells are being read. CHECKING: an integer in the source's memory is being read, which
    shows whether the cells are valid.
    """

    NEW = "new"
    ASKED = "asked"
    GATHERED = "gathered"
    READING = "reading"
    CHECKING = "checking"


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment: a run of packed cells (parts of blocks) that move together.

    Attributes:
        cells: cells of the segment.
        state: state of the segment.
        since: start of the current timeout, in seconds of the read's clock: the creation of the segment, or,
            once the source has packed the cells, the arrival of its reply.
        number: id of the request that asks the source to gather (pack) the segment; 0 if there is none.
        gathered: reply of the source; None if the source has not gathered the segment.
        allocation: staging memory of this worker that the segment holds; None if it holds none.
        handle: handle of the segment's latest READ (one-sided read); None before the first.
        word: index of the element of `PackedReadResources.words` into which the source's word is read; -1 for
            none. The word shows whether the cells are valid.
        direct: True if packing was not possible, so the cells are read straight into blocks instead.
    """

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
    """Split cells (parts of blocks) into segments: runs of cells that move together.

    The last segment may be shorter than the others.

    Args:
        method: transfer method, which determines the number of cells per segment.
        cells: all cells to move.

    Returns:
        Cells of each segment, in the order of `cells`.
    """
    per_segment = method.segment_cells(len(cells))
    return [cells[at : at + per_segment] for at in range(0, len(cells), per_segment)]


class PackedRead:
    """A read of cells that are packed into contiguous staging memory on the way.

    All cells (parts of blocks) belong to one route (set of layers that are read together). Only the lane's
    thread uses this object.

    Attributes:
        failure: reason for the failure; None if the read has not failed.
        peer_lost: True if the transport failed, so the peer may be gone.
    """

    def __init__(
        self,
        resources: PackedReadResources,
        lists: RankLists,
        client: GatherClient | None,
        route: PreparedRoute,
        method: PreparedMethod,
        cells: Cells,
        lease: LeaseWord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Split the cells into segments (runs of cells that move together). `advance` starts to read them.

        A cell is the part of a block that moves as one unit.

        Args:
            resources: resources that all packed reads of the lane (reading thread) share.
            lists: prepared descriptor lists for reading from the peer's rank.
            client: client for requests that ask the peer's rank to pack cells; None if the rank is not asked.
            route: prepared route (set of layers that are read together) of the cells.
            method: method that moves the cells: over-read (the reader also fetches unneeded bytes between the
                needed ones) or staged (the source packs the cells first).
            cells: cells to read.
            lease: index and valid value of the lease word, an integer in the peer's memory. The word shows
                whether the lease on the peer's blocks is valid.
            clock: function that returns the current time in seconds.
        """
        self.failure: str | None = None
        self.peer_lost = False
        self._resources, self._lists, self._client = resources, lists, client
        self._route, self._method, self._lease, self._clock = route, method, lease, clock
        self._rest = segments_of(method, cells)[::-1]
        self._segments: list[_Segment] = []

    @property
    def finished(self) -> bool:
        """True if the read has ended: no segment is in progress, and none is left to start.

        A segment is a run of packed cells (parts of blocks) that move together.
        """
        return not self._segments and (not self._rest or self.failure is not None)

    @property
    def waits_for_source(self) -> bool:
        """True while the source has been asked to pack cells (parts of blocks), and has not replied."""
        return any(segment.state is _SegmentState.ASKED for segment in self._segments)

    @property
    def in_flight(self) -> bool:
        """True while a READ (one-sided read of the peer's memory) of any of the cells is in flight."""
        return any(segment.handle is not None for segment in self._segments)

    def advance(self) -> bool:
        """Advance the read as far as possible without blocking; return whether there was any progress.

        The cells (parts of blocks) are read in segments: runs of cells that move together. At most `AHEAD`
        segments are in progress at a time; when one ends, the next is started.
        """
        moved = self._ask_ahead()
        for segment in list(self._segments):
            # Advance this segment as far as possible before the next, so the source can reuse its memory.
            while segment in self._segments and self._try_step(segment):
                moved = True
            moved |= self._ask_ahead()
        return moved

    def abandon(self, reason: str) -> None:
        """Mark the whole read as failed, so that no further cells (parts of blocks) are read.

        READs (one-sided reads) in flight continue. `finished` becomes True when they have ended.

        Args:
            reason: cause of the failure. The first cause is kept.
        """
        self.failure = self.failure or reason

    # -- steps --------------------------------------------------------------------------------------------

    def _ask_ahead(self) -> bool:
        moved = False
        while self._rest and len(self._segments) < AHEAD and self.failure is None:
            segment = _Segment(self._rest.pop(), _SegmentState.NEW, self._clock())
            self._segments.append(segment)
            moved |= self._try_step(segment)
        return moved

    def _try_step(self, segment: _Segment) -> bool:
        """Take the next step of a segment if it is possible now.

        If the transport raises an exception, the whole packed read fails.

        Args:
            segment: run of packed cells (parts of blocks) that move together.

        Returns:
            True if a step was taken.
        """
        try:
            return self._step(segment)
        except Exception as error:  # noqa: BLE001 - only this read fails
            self._fail(segment, f"the transport failed: {error}", peer_lost=True)
            return True

    def _begin(self, segment: _Segment) -> bool:
        if self._method.announced_route < 0:
            segment.state = _SegmentState.GATHERED
        elif self._source.is_silent(self._clock()):
            self._read_unpacked(segment, "it has not answered lately")
        else:
            cells = segment.cells
            segment.number = self._source.ask(
                self._method.announced_route,
                self._lease,
                cells.src_block,
                self._route.src_cell(cells),
                shared=self._method.shared is not None,
            )
            segment.state = _SegmentState.ASKED
        return True

    @property
    def _source(self) -> GatherClient:
        assert self._client is not None  # noqa: S101 - methods that gather have a client
        return self._client

    def _step(self, segment: _Segment) -> bool:
        if segment.state is _SegmentState.NEW:
            return self._begin(segment)
        if segment.state is _SegmentState.ASKED:
            return self._handle_answer(segment)
        if segment.state is _SegmentState.GATHERED:
            return self._read(segment)
        state = self._resources.agent.state(segment.handle)
        if state is ReadState.IN_FLIGHT:
            return False
        self._resources.agent.release(segment.handle)
        if state is ReadState.FAILED:
            self._fail(segment, "the transport failed while reading", peer_lost=True)
        elif segment.state is _SegmentState.READING and segment.gathered is not None and not segment.direct:
            self._check(segment, segment.gathered)
        else:
            self._land(segment)
        return True

    def _handle_answer(self, segment: _Segment) -> bool:
        if self.failure is not None:
            self._remove_segment(segment)
            return True
        answer = self._source.answer(segment.number)
        if isinstance(answer, Gathered):
            if not self._is_sound(segment, answer):
                self._read_unpacked(segment, f"it names image {answer.position} and word {answer.word}")
            else:
                segment.gathered, segment.state, segment.since = answer, _SegmentState.GATHERED, self._clock()
        elif answer is not None:
            self._read_unpacked(segment, answer.reason)
        elif self._clock() - segment.since > ASK_SECONDS:
            self._source.silent_until = self._clock() + SILENT_SECONDS
            self._read_unpacked(segment, f"no answer within {ASK_SECONDS:g} s")
        else:
            return False
        return True

    def _is_sound(self, segment: _Segment, answer: Gathered) -> bool:
        """Return whether the source's reply refers only to the source's staging area.

        The packed cells must be inside the area. The word (integer in registered memory that shows whether
        the cells are valid) must be one of the area's words.

        Args:
            segment: segment (run of cells that move together) that the source has packed.
            answer: reply of the source.
        """
        inside = answer.position + len(segment.cells) <= self._method.src.blocks
        return inside and answer.word in self._lists.area_words

    def _read_unpacked(self, segment: _Segment, reason: str) -> None:
        """Read the cells of a segment straight into blocks, because they cannot be read packed.

        If the route has no method for this, for example because it would need too many descriptors, the whole
        read fails.

        Args:
            segment: run of cells (parts of blocks) that move together.
            reason: reason why the cells are not read packed.
        """
        if self._route.direct is None:
            self._fail(segment, f"cells that can only move packed were not packed: {reason}")
            return
        self._free_segment(segment)
        segment.direct = True
        self._post(segment, self._route.direct_indices(segment.cells))

    def _read(self, segment: _Segment) -> bool:
        if self.failure is not None:
            self._remove_segment(segment)
            return True
        if not self._has_room(segment):
            if self._clock() - segment.since <= ROOM_SECONDS:
                return False
            self._read_unpacked(segment, f"no room to land for {ROOM_SECONDS:g} s")
            return True
        outgoing = segment.gathered.position if segment.gathered else 0
        if segment.gathered is not None and self._method.shared is not None:
            self._scatter(segment, self._method.shared, outgoing)
            self._check(segment, segment.gathered)
            return True
        self._post(
            segment,
            self._method.indices(
                segment.cells, outgoing, segment.allocation.position if segment.allocation else 0
            ),
        )
        return True

    def _has_room(self, segment: _Segment) -> bool:
        """Try to allocate the local memory that is needed to read the packed cells of a segment.

        If this worker unpacks the cells, they need staging memory. If the source has packed the cells, an
        element of `PackedReadResources.words` is needed, into which the source's word is read (integer that
        shows whether the packed cells are valid).

        Args:
            segment: segment (run of cells that move together) to read.

        Returns:
            True if the segment has all that it needs; False if some of it is not free now.
        """
        if segment.gathered is not None and segment.word < 0:
            if not self._resources.free_words:
                return False
            segment.word = self._resources.free_words.pop()
        if self._method.scatter is not None and self._method.shared is None:
            segment.allocation = self._resources.landing.allocate(len(segment.cells), self._method.stride)
            return segment.allocation is not None
        return True

    def _post(self, segment: _Segment, indices: DescriptorIndices) -> None:
        agent = self._resources.agent
        segment.handle = agent.read(self._lists.local, indices.dst, self._lists.remote, indices.src)
        segment.state = _SegmentState.READING
        self._start(segment)

    def _check(self, segment: _Segment, gathered: Gathered) -> None:
        """Start to read the source's word for a segment whose packed cells have all arrived.

        The word is an integer that changes when the source's staging memory is reused. So it shows whether
        the packed cells are valid.

        Args:
            segment: segment (run of cells that move together) that has been read.
            gathered: reply of the source, which names the word.
        """
        expected = self._word(gathered)
        self._resources.words[segment.word] = ~np.uint64(expected)
        here, there = np.array([segment.word], np.int32), np.array([gathered.word], np.int32)
        segment.handle = self._resources.agent.read(
            self._lists.local_words, here, self._lists.remote_words, there
        )
        segment.state = _SegmentState.CHECKING
        self._start(segment)

    def _start(self, segment: _Segment) -> None:
        try:
            self._resources.agent.post(segment.handle)
        except Exception as error:  # noqa: BLE001 - the handle is polled until the READ has ended
            self.abandon(f"the transport failed: {error}")
            self.peer_lost = True

    def _word(self, gathered: Gathered) -> int:
        return self._lists.incarnation << 32 | gathered.generation

    def _land(self, segment: _Segment) -> None:
        gathered = segment.gathered if segment.state is _SegmentState.CHECKING else None
        if gathered and int(self._resources.words[segment.word]) != self._word(gathered):
            self._fail(segment, "the source used its staging area for others before it was read")
            return
        if segment.allocation is not None and self.failure is None:
            self._scatter(segment, self._resources.landing, segment.allocation.position)
        self._remove_segment(segment)

    def _scatter(self, segment: _Segment, area: StagingArea | MappedArea, first: int) -> None:
        loops, cells = self._method.scatter, segment.cells
        assert loops is not None  # noqa: S101 - only a method that scatters has images to unpack
        loops.scatter(cells.dst_block, cells.number, area.images(self._method.stride), first)

    def _fail(self, segment: _Segment, reason: str, *, peer_lost: bool = False) -> None:
        self.abandon(reason)
        self.peer_lost |= peer_lost
        self._remove_segment(segment)

    def _remove_segment(self, segment: _Segment) -> None:
        """Remove a segment from the read, and free all memory that the segment holds.

        None of the segment's READs (one-sided reads) may be in flight.

        Args:
            segment: run of packed cells (parts of blocks) that move together.
        """
        self._segments.remove(segment)
        self._free_segment(segment)

    def _free_segment(self, segment: _Segment) -> None:
        """Free everything that a segment holds.

        This is staging memory of the source, staging memory of this worker, and an element of
        `PackedReadResources.words`.

        Args:
            segment: run of packed cells (parts of blocks) that move together.
        """
        if segment.number and self._client is not None:
            self._client.done(segment.number)
        if segment.allocation is not None:
            self._resources.landing.free(segment.allocation)
        if segment.word >= 0:
            self._resources.free_words.append(segment.word)
        segment.number, segment.allocation, segment.word = 0, None, -1
