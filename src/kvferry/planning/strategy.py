"""Transfer methods of a route, and the choice among them by cost.

- *direct*: the destination reads every run with one descriptor.
- *over-read*: the destination reads contiguous ranges of the source, gaps included, into images. Then it
  copies the bytes that it needs into place.
- *staged*: the source *gathers* the cell into an image in the byte order of the destination, which reads it
  directly into place. If the destination's own runs are short too, it reads the image into staging memory and
  *scatters* it from there.
- *shared*: both run on one machine. The source gathers the cell into host memory that the destination has
  mapped, and the destination scatters it from there. The transport carries no KV.

A `TransferMethod` is one of these methods for one route, with its work per cell. `Costs` turns work into
seconds. The defaults are those of two cores of an AMD EPYC with NIXL over UCX on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvferry.common.errors import ConfigError
from kvferry.planning.cell_copy import PoolCopies
from kvferry.planning.descriptors import Descriptors
from kvferry.planning.packed_image import PackedImage, fetch_image, gather_image
from kvferry.planning.strided_copy import StridedCopy, fuse_copies
from kvferry.planning.template import Route

# A direct transfer has at most this many runs per cell, because a descriptor is prepared for each.
MAX_RUNS = 1 << 17

# A staged read is divided, so that the source gathers one segment while the previous one is read.
SEGMENTS = 4

# Small segments need more round trips, and large ones need more staging memory.
SMALLEST_SEGMENT_BYTES, LARGEST_SEGMENT_BYTES = 2 << 20, 16 << 20

# A segment that is unpacked or digested after the READ is small enough that the CPU's cache still holds it.
FETCHED_SEGMENT_BYTES = 4 << 20

# A lane gets no smaller part of a route than this.
LANE_BYTES = 2 << 20

# All lanes read a transfer of this size or more.
LARGE_BYTES = 2 * LANE_BYTES

# Run length from which a GPU's copy engine copies to and from host memory, unless it was measured.
COPY_ENGINE_BYTES = 512 << 10

# Smallest and largest value of costs that are neither seconds, nor shares, nor gains.
_LIMITS = {"copy_engine_bytes": (1, 1 << 40)}

# A copy to or from host memory takes at least this long per byte: 25 GB/s, what the bus of a GPU reaches.
_HOST_BYTE_SECONDS = 4e-11

# The shared strategy is considered where a byte of a READ costs this much more than a copied one. Where READs
# are carried as they should be, they leave the cores and the host memory to the engines.
_SLOW_READS = 4.0


class Strategy(StrEnum):
    """How the bytes of a cell are transferred."""

    DIRECT = "direct"
    OVER_READ = "over-read"
    STAGED = "staged"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of transfer operations on a machine, for one lane. ``kvferry doctor --calibrate`` measures them.

    Attributes:
        read_*: of a READ, per descriptor and per byte.
        copy_*_seconds: of packing or unpacking, per call of the copy operation (one per `StridedCopy` and
            cell), per contiguous run and per byte.
        ask_seconds: round-trip time of a request to the source to pack one segment.
        overlap: fraction of the shorter of two times (packing at the source, reading at the destination) that
            is saved because both happen at once: 1 between two machines, as low as 0 on one busy machine.
        lanes_work_gain, lanes_byte_gain: factors by which all lanes together are faster than one at the work
            per descriptor, call and run (CPU cores), and at the work per byte (memory bandwidth).
        copy_engine_bytes: shortest run that a GPU's copy engine copies to or from host memory faster than a
            kernel does.
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
    copy_engine_bytes: float = COPY_ENGINE_BYTES

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            low, high = _LIMITS.get(name, (1, 64) if name.endswith("_gain") else (0, 1))
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, it must be at least {low} and at most {high}")

    @property
    def gap_bytes(self) -> int:
        """Length in bytes of the longest gap between two runs that is cheaper to read than to skip."""
        # Skipping a gap takes one more descriptor. A calibration may measure a byte as free.
        return int(self.read_descriptor_seconds / max(self.read_byte_seconds, 1e-15))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of transferring one cell by one method.

    The source gathers and the destination scatters: calls of the copy operation, and runs that it copies.
    """

    descriptors: float
    read_bytes: float
    gather_calls: float = 0
    gather_runs: float = 0
    scatter_calls: float = 0
    scatter_runs: float = 0
    bytes: float = 0  # useful ones of the cell; each copy operation copies so many
    shared: bool = False  # the copies go to and from host memory, wherever the KV cache is

    def seconds(self, cells: int, costs: Costs) -> float:
        total = cells * self.bytes
        read, gather = self.cell_seconds(costs, large=total >= LARGE_BYTES)
        return _seconds(cells, total, read, gather, costs)

    def cell_seconds(self, costs: Costs, *, large: bool) -> tuple[float, float | None]:
        """Return the seconds for one cell at the destination, and at the source; None if it gathers nothing.

        The cell is part of a `large` transfer, of `LARGE_BYTES` or more, or of a small one.
        """
        c, least = costs, _HOST_BYTE_SECONDS if self.shared else 0.0
        # All lanes read and scatter a large transfer. The source gathers with one thread in any case.
        work_gain, byte_gain = (c.lanes_work_gain, c.lanes_byte_gain) if large else (1.0, 1.0)
        work = self.descriptors * c.read_descriptor_seconds
        byte = self.read_bytes * c.read_byte_seconds / byte_gain
        if self.scatter_runs:
            work += self.scatter_calls * c.copy_call_seconds + self.scatter_runs * c.copy_run_seconds
            byte += self.bytes * max(c.copy_byte_seconds / byte_gain, least)
        read = work / work_gain + byte
        if not self.gather_runs:
            return read, None
        work = self.gather_calls * c.copy_call_seconds + self.gather_runs * c.copy_run_seconds
        return read, work + self.bytes * max(c.copy_byte_seconds, least)


def _seconds(cells: int, total: float, read: float, gather: float | None, costs: Costs) -> float:
    """Return the duration of a transfer of `total` bytes, whose cells take so many seconds on each side."""
    ours = cells * read
    if gather is None:
        return ours
    gathering, segments = cells * gather, max(1.0, total / segment_bytes(total))
    ours += segments * costs.read_descriptor_seconds
    # The first segment is gathered before anything can be read, so nothing hides it.
    hidden = costs.overlap * min(gathering, ours) * (1 - 1 / segments)
    return segments * costs.ask_seconds + gathering + ours - hidden


@dataclass(frozen=True, slots=True)
class TransferMethod:
    """One method to transfer the cells of a route, with an `image` unless it is direct.

    `landing` are copies by which the destination unpacks what the source has packed; None if it does not.
    """

    strategy: Strategy
    work: Work
    image: PackedImage | None = None
    landing: tuple[PoolCopies, ...] | None = None

    @property
    def scatters(self) -> tuple[PoolCopies, ...] | None:
        """Copies by which the destination unpacks an image, of whatever strategy; None if it unpacks none."""
        if self.image is not None and self.strategy is Strategy.OVER_READ:
            return self.image.pool_copies
        return self.landing


def segment_bytes(total: float) -> int:
    """Return the size in bytes of one segment of a staged transfer of `total` bytes.

    >>> segment_bytes(64 << 20) >> 20, segment_bytes(1 << 30) >> 20  # a fourth of 64 MiB; the maximum
    (16, 16)
    """
    return int(min(max(total / SEGMENTS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES))


def transfer_methods(
    route: Route,
    costs: Costs,
    max_image_bytes: int,
    region_starts: Sequence[int] = (),
    *,
    shared: bool = False,
) -> tuple[TransferMethod, ...]:
    """Return all methods that can transfer the cells of a route, without those with larger images.

    No read may cross a start in `region_starts`, addresses of the source. The destination has mapped the
    source's host memory if `shared`. Raise ConfigError if no method is left.
    """
    found = []
    size = route.cell_bytes
    if route.run_count <= MAX_RUNS:
        found.append(TransferMethod(Strategy.DIRECT, Work(route.runs_per_cell, size, bytes=size)))
    if image := _fetch_image(route, costs.gap_bytes, region_starts):
        calls, runs = _copies(image.pool_copies)
        work = Work(_read_count(image), image.bytes, scatter_calls=calls, scatter_runs=runs, bytes=size)
        found.append(TransferMethod(Strategy.OVER_READ, work, image))
    if image := gather_image(route.cell_copies):
        calls, runs = _copies(image.pool_copies)
        found.append(
            TransferMethod(Strategy.STAGED, Work(_read_count(image), size, calls, runs, bytes=size), image)
        )
        landing = tuple(PoolCopies(each.at, _as_strided_copies(each.descriptors)) for each in image.reads)
        scatter_calls, scatter_runs = _copies(landing)
        work = Work(0, size, calls, runs, scatter_calls, scatter_runs, bytes=size)
        found.append(TransferMethod(Strategy.STAGED, work, image, landing))
        if shared:
            work = replace(work, read_bytes=0, shared=True)
            found.append(TransferMethod(Strategy.SHARED, work, image, landing))
    fitting = [method for method in found if method.image is None or method.image.stride <= max_image_bytes]
    if not fitting:
        raise ConfigError(
            f"cells of {size} bytes in {route.run_count} runs can only move packed, and staging memory has "
            f"room for cells of {max_image_bytes} bytes; raise staging_mib"
        )
    return tuple(fitting)


class _Choice(NamedTuple):
    """A method, by its index, with its `Work.cell_seconds` in a small and in a large transfer."""

    number: int
    small: tuple[float, float | None]
    large: tuple[float, float | None]

    def never_cheaper(self, other: _Choice) -> bool:
        """Return True if a cell takes at least as long as with another method, on both sides."""
        for (read, gather), (than, other_gather) in ((self.small, other.small), (self.large, other.large)):
            less_to_gather = other_gather is not None and (gather is None or gather < other_gather)
            if read < than or less_to_gather:
                return False
        return True


class MethodPrices:
    """The `costs` of all transfer methods of a route, worked out per cell, to choose one for each read."""

    def __init__(self, methods: Sequence[TransferMethod], costs: Costs) -> None:
        self.costs = costs
        self._bytes = methods[0].work.bytes  # the same for all methods
        works = [method.work for method in methods]
        everything = [
            _Choice(n, work.cell_seconds(costs, large=False), work.cell_seconds(costs, large=True))
            for n, work in enumerate(works)
        ]
        slow = costs.read_byte_seconds >= _SLOW_READS * max(costs.copy_byte_seconds, _HOST_BYTE_SECONDS)
        usual = [one for one in everything if slow or methods[one.number].strategy is not Strategy.SHARED]
        self._choices: dict[Strategy | None, list[_Choice]] = {}
        for strategy in (None, *Strategy):
            # Methods of the strategy, or for lack of any those that are considered here.
            found = [one for one in everything if methods[one.number].strategy is strategy]
            self._choices[strategy] = _worth_pricing(found or usual or everything)

    def cheapest(self, cells: int, strategy: Strategy | None = None) -> int:
        """Return the index of the method with the shortest expected duration, of `strategy` if any has it."""
        choices = self._choices[strategy]
        if len(choices) == 1:
            return choices[0].number
        total = cells * self._bytes
        prices = [one.large if total >= LARGE_BYTES else one.small for one in choices]
        seconds = [_seconds(cells, total, read, gather, self.costs) for read, gather in prices]
        return choices[seconds.index(min(seconds))].number


def _worth_pricing(choices: Sequence[_Choice]) -> list[_Choice]:
    """Return the methods that may be the cheapest for some number of cells: at least one."""
    # Often it is only one: where descriptors are long, direct takes the least time on both sides.
    kept: list[_Choice] = []
    for choice in choices:
        if not any(choice.never_cheaper(other) for other in kept):
            kept.append(choice)
    return kept


def choose_method(
    methods: Sequence[TransferMethod], cells: int, costs: Costs, strategy: Strategy | None = None
) -> int:
    """Return the index of the method with the shortest expected duration, of `strategy` if any has it."""
    return MethodPrices(methods, costs).cheapest(cells, strategy)


def _fetch_image(route: Route, gap_bytes: int, region_starts: Sequence[int]) -> PackedImage | None:
    image = fetch_image(route.cell_copies, gap_bytes, region_starts)
    # A read longer than the distance between blocks would read other blocks, which is never worth it.
    while image and gap_bytes and image.longest > route.src_stride:
        gap_bytes //= 4
        image = fetch_image(route.cell_copies, gap_bytes, region_starts)
    return image


def _read_count(image: PackedImage) -> int:
    return sum(len(each.descriptors) for each in image.reads)


def _copies(parts: Sequence[PoolCopies]) -> tuple[int, int]:
    copies = [copy for part in parts for copy in part.nests]
    return len(copies), sum(copy.run_count for copy in copies)


def _as_strided_copies(reads: Descriptors) -> tuple[StridedCopy, ...]:
    rows = zip(reads.src.tolist(), reads.dst.tolist(), reads.length.tolist(), strict=True)
    return fuse_copies(StridedCopy(*row) for row in rows)
