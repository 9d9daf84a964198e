"""Transfer methods of a route (direct, over-read, staged), and the choice among them by expected cost.

- *direct*: every run is a descriptor.
- *over-read*: the destination reads contiguous ranges of the source, gaps included, and unpacks its own
  bytes.
- *staged*: the source packs an image in the destination's order. The destination reads it straight into
  place, or, if its own runs are short too, reads it whole and unpacks it.

A `TransferMethod` is one of these for one route, with its work per cell. `Costs` prices that work: measured
on a machine by ``kvferry bench calibrate``, or the defaults, which are those of two cores of an AMD EPYC
and NIXL over UCX on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Descriptors
from kvferry.planning.packed_image import PackedImage, fetch_image, gather_image
from kvferry.planning.strided_copy import StridedCopy, fuse_copies
from kvferry.planning.template import Route

MAX_ROWS = 1 << 17
"""Maximum number of runs per cell of a direct transfer."""

SEGMENTS = 4
"""Segments that a staged read is split into: one is gathered while the previous one is read."""

SMALLEST_SEGMENT_BYTES, LARGEST_SEGMENT_BYTES = 2 << 20, 16 << 20
"""Size limits of a gathered segment: each costs a round trip, and each holds staging memory."""

FETCHED_SEGMENT_BYTES = 4 << 20
"""Size of an over-read segment, small enough to be unpacked from the CPU's cache."""

LANE_BYTES = 2 << 20
"""Smallest share of a route that a lane gets."""


class Strategy(StrEnum):
    """The strategy for moving the bytes of a route."""

    DIRECT = "direct"
    OVER_READ = "over-read"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of work on a machine, measured by ``kvferry bench calibrate``.

    Attributes:
        read_descriptor_seconds, read_byte_seconds: cost of a READ, per descriptor and per byte.
        copy_call_seconds, copy_run_seconds, copy_byte_seconds: cost of a gather or scatter, per call of the
            copy operation (one per nest and cell), per contiguous run and per byte.
        ask_seconds: round trip of a request to the source to gather a segment.
        overlap: share of the shorter operation that is hidden when one segment is gathered while another is
            read: 1 between two machines, down to 0 on one busy machine.
        lanes_work_gain, lanes_byte_gain: speedup of all lanes over one: for descriptors, calls and runs,
            which a core limits, and for bytes, which memory limits. The other costs are those of one lane.
    """

    read_descriptor_seconds: float = 2.0e-6
    read_byte_seconds: float = 6.8e-11
    copy_call_seconds: float = 9.0e-7
    copy_run_seconds: float = 7.5e-9
    copy_byte_seconds: float = 7.3e-11
    ask_seconds: float = 3.0e-4
    overlap: float = 0.0
    lanes_work_gain: float = 1.8
    lanes_byte_gain: float = 1.2

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = (1, 64) if name.endswith("_gain") else (0, 1)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, it must be at least {low} and at most {high}")

    def of_lanes(self) -> Costs:
        """Return the costs when all lanes share the work."""
        return replace(
            self,
            read_descriptor_seconds=self.read_descriptor_seconds / self.lanes_work_gain,
            read_byte_seconds=self.read_byte_seconds / self.lanes_byte_gain,
            copy_call_seconds=self.copy_call_seconds / self.lanes_work_gain,
            copy_run_seconds=self.copy_run_seconds / self.lanes_work_gain,
            copy_byte_seconds=self.copy_byte_seconds / self.lanes_byte_gain,
        )

    @property
    def gap_bytes(self) -> int:
        """Bytes that take as long to read as one more descriptor."""
        return int(self.read_descriptor_seconds / max(self.read_byte_seconds, 1e-15))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of moving one cell.

    Attributes:
        descriptors, read_bytes: size of the READ.
        gather_calls, gather_runs: calls and runs of the source's copy operation.
        scatter_calls, scatter_runs: the same at the destination.
        bytes: useful bytes, which every copy moves.
    """

    descriptors: float
    read_bytes: float
    gather_calls: float = 0
    gather_runs: float = 0
    scatter_calls: float = 0
    scatter_runs: float = 0
    bytes: float = 0

    def seconds(self, cells: int, costs: Costs) -> float:
        """Return the expected seconds to move `cells` cells."""
        c = costs
        shared = cells * self.bytes >= 2 * LANE_BYTES
        here = c.of_lanes() if shared else c
        read = cells * (
            self.descriptors * here.read_descriptor_seconds + self.read_bytes * here.read_byte_seconds
        )
        scatter = self._copy(cells, self.scatter_calls, self.scatter_runs, here)
        if not self.gather_runs:
            return read + scatter
        segments = max(1.0, cells * self.read_bytes / segment_bytes(cells * self.read_bytes))
        gather = self._copy(cells, self.gather_calls, self.gather_runs, c)
        ours = read + scatter + segments * c.read_descriptor_seconds
        hidden = c.overlap * min(gather, ours) * (1 - 1 / segments)
        return segments * c.ask_seconds + gather + ours - hidden

    def _copy(self, cells: int, calls: float, runs: float, c: Costs) -> float:
        if not runs:
            return 0.0
        return cells * (
            calls * c.copy_call_seconds + runs * c.copy_run_seconds + self.bytes * c.copy_byte_seconds
        )


@dataclass(frozen=True, slots=True)
class TransferMethod:
    """One method to move the cells of a route.

    Attributes:
        strategy: direct, over-read or staged.
        work: work per cell.
        image: layout of packed cells; None for direct.
        landing: copies that unpack a gathered image that is read whole; None if it is read into place.
    """

    strategy: Strategy
    work: Work
    image: PackedImage | None = None
    landing: tuple[PoolCopies, ...] | None = None

    @property
    def scatters(self) -> tuple[PoolCopies, ...] | None:
        """Copies from the image to the destination's memory; None if nothing is unpacked."""
        if self.image is not None and self.strategy is Strategy.OVER_READ:
            return self.image.nests
        return self.landing


def segment_bytes(total: float) -> int:
    """Return the bytes of one gathered segment, for images of `total` bytes.

    >>> segment_bytes(64 << 20) >> 20, segment_bytes(1 << 30) >> 20
    (16, 16)
    """
    return int(min(max(total / SEGMENTS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES))


def transfer_methods(
    route: Route, costs: Costs, max_image_bytes: int, cuts: Sequence[int] = ()
) -> tuple[TransferMethod, ...]:
    """Return all methods that can move a route's cells.

    Args:
        route: the route.
        costs: costs that decide the longest gap that is read rather than skipped.
        max_image_bytes: room for one image; a route with larger cells only goes direct.
        cuts: addresses at which the source's registered regions begin.

    Raises:
        ConfigError: cells have too many runs for direct and are too large for an image.
    """
    found = []
    size = route.cell_bytes
    if route.row_count <= MAX_ROWS:
        found.append(TransferMethod(Strategy.DIRECT, Work(len(route.rows), size, bytes=size)))
    if image := _fetch_image(route, costs.gap_bytes, cuts):
        calls, runs = _copies(image.nests)
        work = Work(_read_count(image), image.bytes, scatter_calls=calls, scatter_runs=runs, bytes=size)
        found.append(TransferMethod(Strategy.OVER_READ, work, image))
    if image := gather_image(route.cell_copies):
        calls, runs = _copies(image.nests)
        found.append(
            TransferMethod(Strategy.STAGED, Work(_read_count(image), size, calls, runs, bytes=size), image)
        )
        landing = tuple(PoolCopies(each.at, _as_nests(each.descriptors)) for each in image.reads)
        scatter_calls, scatter_runs = _copies(landing)
        work = Work(
            descriptors=0,
            read_bytes=size,
            gather_calls=calls,
            gather_runs=runs,
            scatter_calls=scatter_calls,
            scatter_runs=scatter_runs,
            bytes=size,
        )
        found.append(TransferMethod(Strategy.STAGED, work, image, landing))
    packed = [way for way in found if way.image is None or way.image.stride <= max_image_bytes]
    if not packed:
        raise ConfigError(
            f"cells of {size} bytes in {route.row_count} runs can only move packed, and staging memory "
            "has room "
            f"for cells of {max_image_bytes} bytes; raise staging_mib"
        )
    return tuple(packed)


def choose_method(
    found: Sequence[TransferMethod], cells: int, costs: Costs, pinned: Strategy | None = None
) -> int:
    """Return the index of the fastest method for `cells` cells; of strategy `pinned`, if one has it."""
    allowed = [i for i, way in enumerate(found) if way.strategy is pinned] or range(len(found))
    return min(allowed, key=lambda i: found[i].work.seconds(cells, costs))


def _fetch_image(route: Route, gap_bytes: int, cuts: Sequence[int]) -> PackedImage | None:
    """Return the layout of fetched images, with reads of at most a block: reading other blocks never pays."""
    image = fetch_image(route.cell_copies, gap_bytes, cuts)
    while image and gap_bytes and image.longest > route.src_stride:
        gap_bytes //= 4
        image = fetch_image(route.cell_copies, gap_bytes, cuts)
    return image


def _read_count(image: PackedImage) -> int:
    """Return the number of reads per cell."""
    return sum(len(each.descriptors) for each in image.reads)


def _copies(parts: Sequence[PoolCopies]) -> tuple[int, int]:
    """Return the calls of the copy operation and the runs per cell."""
    nests = [nest for part in parts for nest in part.nests]
    return len(nests), sum(nest.rows for nest in nests)


def _as_nests(reads: Descriptors) -> tuple[StridedCopy, ...]:
    rows = zip(reads.src.tolist(), reads.dst.tolist(), reads.length.tolist(), strict=True)
    return fuse_copies(StridedCopy(*row) for row in rows)
