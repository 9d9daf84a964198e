"""The parts of a load from the tiers, ordered as chunks arrive in host memory.

    begin ─▶ part, part, ... ─▶ end      to every rank, in this order
             each part copied by all ranks ─▶ its slots are released

The fetch of the chunks is cancelled when the load fails or its request no longer waits for it. The ranks then
receive the end at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.fetch import Fetch
from kvferry.cache.reading import Reading
from kvferry.connector.events import MissReason
from kvferry.connector.load import GroupBytes, Load
from kvferry.connector.messages import LoadPart, Report
from kvferry.connector.stream import Refusals
from kvferry.connector.worker.orders import LoadOrder, Piece
from kvferry.tiers.host.tier import Slot
from kvferry.tiers.names import TIERS
from kvferry.tiers.outcome import GetOutcome

COPIED = "copied"
"""Transfer strategy reported for chunks. Loads from peers report their own strategies."""

_MISSES = {
    GetOutcome.ABSENT: MissReason.EVICTED,
    GetOutcome.CORRUPT: MissReason.CHECKSUM,
    GetOutcome.OTHER_SHAPE: MissReason.CHECKSUM,
}


@dataclass(slots=True)
class CopiedPart:
    """A part of a load whose chunks ranks copy to KV blocks. Mutable.

    Attributes:
        slots: host memory of the chunks.
        report: merged report of the ranks that have copied them; None before the first.
    """

    slots: Sequence[Slot]
    report: Report | None = None


class ChunkFeed:
    """Orders the parts of one load of chunks. Chunks that have arrived since the last step are one part."""

    def __init__(
        self,
        load: Load,
        fetch: Fetch,
        *,
        reading: Reading,
        excluded_tiers: set[str],
        refusals: Refusals,
        labels: Sequence[str],
    ) -> None:
        """Create the feed of a load that begins now.

        Args:
            load: load to order.
            fetch: reads of the load's chunks into host memory.
            reading: chunks being read from the tiers, in which the fetch was begun.
            excluded_tiers: tiers that are not used again for the request. Mutated if reads fail or are late.
            refusals: log of the requests that a tier cannot serve.
            labels: label of each KV cache group of the storage format.
        """
        self._load, self._fetch, self._reading = load, fetch, reading
        self._excluded_tiers, self._refusals, self._labels = excluded_tiers, refusals, labels
        self._copying: dict[str, CopiedPart] = {}
        self._parts, self._told = 0, False
        self._end: LoadPart | None = None
        self._sizes, self._miss = Counter[int](), MissReason.FAILED

    @property
    def fetches(self) -> bool:
        """True while chunks are read into host memory, or wait there to be copied."""
        return self._end is None

    @property
    def busy(self) -> bool:
        """True until the ranks know the end of the load and have copied all its chunks."""
        return not self._told or bool(self._copying)

    @property
    def origin(self) -> str:
        """Name of the slowest tier from which chunks are read."""
        return self._reading.origin(self._fetch)

    def next_parts(self) -> Sequence[LoadPart]:
        parts = []
        if self._end is None:
            if ready := self._fetch.take():
                pieces = sorted(
                    (Piece(wanted.group, wanted.number, slot.offset) for wanted, slot in ready),
                    key=lambda piece: (piece.group, piece.number),
                )
                self._parts += 1
                key = f"{self._load.key}/{self._parts}"
                self._copying[key] = CopiedPart([slot for _, slot in ready])
                parts.append(LoadPart(self._load.key, LoadOrder(key, tuple(pieces), first=self._parts == 1)))
            if self._fetch.over:
                self._excluded_tiers |= self._fetch.failed
                self.stop(self._fetch.failure)
        if self._end is not None:
            parts.append(self._end)
            self._told = True
        return parts

    def stop(self, failure: str | None) -> None:
        """Read nothing more, and tell the ranks the end. Do nothing if the feed has stopped already.

        Args:
            failure: reason why chunks are missing; None if none is.
        """
        if self._end is None:
            self._reading.cancel(self._fetch)
            if self._fetch.miss is not None:
                self._miss = _MISSES.get(self._fetch.miss, self._miss)
            self._end = LoadPart(self._load.key, None, last=failure is None, failure=failure)

    def drop(self) -> None:
        """Cancel the load. Chunks that arrive later stay in host memory."""
        self.stop("nobody waits for it any more")

    def take_report(self, key: str, report: Report, workers: int) -> CopiedPart | None:
        """Merge a report into that of its part. Return the part, and forget it, if all ranks have copied it.

        Args:
            key: key of the order; None is returned if it is none of this load.
            report: report of one rank, or merged report of several.
            workers: number of ranks.
        """
        if (part := self._copying.get(key)) is None:
            return None
        part.report = report if part.report is None else part.report.with_other(report)
        if part.report.workers < workers:
            return None
        self._sizes.update(dict(enumerate(part.report.figures.bytes_by_group)))
        return self._copying.pop(key)

    def moved(self, report: Report) -> tuple[GroupBytes, ...]:
        return tuple(
            GroupBytes(self._labels[number], COPIED, size)
            for number, size in sorted(self._sizes.items())
            if size
        )

    def miss(self, report: Report) -> MissReason:
        return MissReason.DEADLINE if report.late else self._miss

    def ended(self, report: Report, *, wanted: bool) -> None:
        if wanted and report.failure is not None:
            self._refusals.say(self._load.request_id, TIERS, report.failure)
            # Before the end, chunks were still awaited: their tiers were too slow. After it, the ranks were.
            if report.late and self._end is None:
                self._excluded_tiers |= self._reading.awaited_tiers(self._fetch)
        self.stop(report.failure)
        self._told = True
