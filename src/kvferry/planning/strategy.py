"""Transfer methods of a route (direct, over-read, staged, shared), and the choice among them by cost.

A *cell* is the part of a block that is copied as one unit, and an *image* is a cell packed into contiguous
staging memory.

- *direct*: the destination reads every run with one descriptor.
- *over-read*: the destination reads contiguous ranges of the source, gaps included, into images. Then it
  copies the bytes that it needs into place.
- *staged*: the source *gathers* the cell: it copies the cell's bytes into an image in the byte order of the
  destination. The destination reads the image directly into place. If the destination's own runs are short
  too, it reads the image into staging memory and *scatters* it: it copies the bytes from there into place.
- *shared*: the source gathers the cell into host memory that the destination has mapped, because both run on
  one machine. The destination scatters the image from there. The transport carries no KV.

A `TransferMethod` is one of these methods for one route, with its work per cell. `Costs` turns work into
seconds. ``kvferry doctor --calibrate`` measures the costs of a machine. The defaults are those of two cores
of an AMD EPYC with NIXL over UCX on one host.
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

MAX_RUNS = 1 << 17
"""Maximum number of runs per cell in a direct transfer."""

SEGMENTS = 4
"""Number of segments of a staged read. The source gathers one segment while the previous one is read."""

SMALLEST_SEGMENT_BYTES, LARGEST_SEGMENT_BYTES = 2 << 20, 16 << 20
"""Size limits of a gathered segment in bytes. Small segments need more round trips, and large ones need more
staging memory."""

FETCHED_SEGMENT_BYTES = 4 << 20
"""Size of an over-read segment in bytes, small enough that the CPU's cache still holds it when it is
unpacked."""

LANE_BYTES = 2 << 20
"""Smallest part of a route in bytes that is given to one lane (thread that reads)."""


COPY_ENGINE_BYTES = 512 << 10
"""Run length from which a GPU's copy engine copies to and from host memory, unless it was measured."""


class Strategy(StrEnum):
    """How the bytes of a cell (part of a block that is copied as one unit) are transferred.

    DIRECT: the destination reads each contiguous run of bytes into place. OVER_READ: the destination reads
    whole ranges of the source, gaps included, and copies the needed bytes into place. STAGED: the source
    packs the bytes into contiguous memory, and the destination reads them from there. SHARED: the source
    packs the bytes into host memory that both sides have mapped, and the destination copies them from there.
    """

    DIRECT = "direct"
    OVER_READ = "over-read"
    STAGED = "staged"
    SHARED = "shared"


_LIMITS = {"copy_engine_bytes": (1, 1 << 40)}
"""Smallest and largest value of costs that are neither seconds, nor shares, nor gains."""


_HOST_BYTE_SECONDS = 4e-11
"""Least seconds per byte of a copy to or from host memory: 25 GB/s, what the bus of a GPU reaches."""

_SLOW_READS = 4.0
"""Factor by which a byte of a READ must cost more than a copy, so that the shared strategy is considered.

Where READs are carried as they should be, they leave the cores and the host memory to the engines.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of transfer operations on a machine, as measured by ``kvferry doctor --calibrate``.

    A *lane* is a thread that reads. Costs in seconds are those of one lane.

    Attributes:
        read_descriptor_seconds, read_byte_seconds: cost of a READ in seconds per descriptor and per byte.
        copy_call_seconds, copy_run_seconds, copy_byte_seconds: cost of packing or unpacking bytes in seconds
            per call of the copy operation (one call per `StridedCopy` and cell), per contiguous run and per
            byte.
        ask_seconds: round-trip time in seconds of a request that asks the source to pack one segment of a
            transfer.
        overlap: fraction of the shorter of two times (packing at the source, reading at the destination) that
            is saved because the source packs one segment while the destination reads another. It is 1 between
            two machines, and as low as 0 on one busy machine.
        lanes_work_gain: factor by which all lanes together are faster than one lane at the work per
            descriptor, call and run; limited by CPU cores.
        lanes_byte_gain: factor by which all lanes together are faster than one lane at the work per byte;
            limited by memory bandwidth.
        copy_engine_bytes: length in bytes of the shortest run that a GPU's copy engine copies to or from host
            memory faster than a kernel does. Not used where KV is in host memory.
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

    def of_lanes(self) -> Costs:
        """Return the costs per unit of work if all lanes (threads that read) share the work."""
        return replace(
            self,
            read_descriptor_seconds=self.read_descriptor_seconds / self.lanes_work_gain,
            read_byte_seconds=self.read_byte_seconds / self.lanes_byte_gain,
            copy_call_seconds=self.copy_call_seconds / self.lanes_work_gain,
            copy_run_seconds=self.copy_run_seconds / self.lanes_work_gain,
            copy_byte_seconds=self.copy_byte_seconds / self.lanes_byte_gain,
        )

    @property
    def host_byte_seconds(self) -> float:
        """Cost of packing or unpacking a byte in seconds, if the packed side is in host memory."""
        return max(self.copy_byte_seconds, _HOST_BYTE_SECONDS)

    @property
    def gap_bytes(self) -> int:
        """Length in bytes of the longest gap between two runs that is cheaper to read than to skip.

        Skipping a gap takes one more descriptor.
        """
        return int(self.read_descriptor_seconds / max(self.read_byte_seconds, 1e-15))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of transferring one cell (part of a block that is copied as one unit) by one method.

    Attributes:
        descriptors, read_bytes: number of descriptors, and number of bytes, of the READ.
        gather_calls, gather_runs: number of calls of the source's copy operation, and number of runs that the
            source copies; 0 if the source copies nothing.
        scatter_calls, scatter_runs: number of calls of the destination's copy operation, and number of runs
            that the destination copies; 0 if the destination copies nothing.
        bytes: number of useful bytes of the cell. Each copy operation copies this number of bytes.
        shared: True if the copies go to and from host memory, wherever the KV cache is.
    """

    descriptors: float
    read_bytes: float
    gather_calls: float = 0
    gather_runs: float = 0
    scatter_calls: float = 0
    scatter_runs: float = 0
    bytes: float = 0
    shared: bool = False

    def seconds(self, cells: int, costs: Costs) -> float:
        """Return the expected duration in seconds of a transfer of `cells` cells (parts of blocks).

        Args:
            cells: number of cells to transfer.
            costs: costs of the machine for one lane (thread that reads).
        """
        c = costs
        here = c.of_lanes() if cells * self.bytes >= 2 * LANE_BYTES else c
        read = cells * (
            self.descriptors * here.read_descriptor_seconds + self.read_bytes * here.read_byte_seconds
        )
        scatter = self._copy(cells, self.scatter_calls, self.scatter_runs, here)
        if not self.gather_runs:
            return read + scatter
        segments = max(1.0, cells * self.bytes / segment_bytes(cells * self.bytes))
        gather = self._copy(cells, self.gather_calls, self.gather_runs, c)
        ours = read + scatter + segments * c.read_descriptor_seconds
        hidden = c.overlap * min(gather, ours) * (1 - 1 / segments)
        return segments * c.ask_seconds + gather + ours - hidden

    def _copy(self, cells: int, calls: float, runs: float, c: Costs) -> float:
        if not runs:
            return 0.0
        byte_seconds = c.host_byte_seconds if self.shared else c.copy_byte_seconds
        return cells * (calls * c.copy_call_seconds + runs * c.copy_run_seconds + self.bytes * byte_seconds)


@dataclass(frozen=True, slots=True)
class TransferMethod:
    """One method to transfer the cells of a route.

    A route is a set of layers that are copied together between two ranks. A cell is the part of a block that
    is copied as one unit. An image is a cell packed into contiguous memory.

    Attributes:
        strategy: direct, over-read (the destination reads whole pages and unpacks them), staged (the source
            packs cells before the destination reads them) or shared (the source packs cells into host memory
            that the destination has mapped).
        work: numbers of descriptors, bytes and copies that one cell costs.
        image: layout of images; None for the direct strategy.
        landing: copies by which the destination unpacks an image that the source has packed. None if no image
            is packed, or if READs put its bytes straight into blocks.
    """

    strategy: Strategy
    work: Work
    image: PackedImage | None = None
    landing: tuple[PoolCopies, ...] | None = None

    @property
    def scatters(self) -> tuple[PoolCopies, ...] | None:
        """Copies by which the destination unpacks an image (packed cell); None if it unpacks no image."""
        if self.image is not None and self.strategy is Strategy.OVER_READ:
            return self.image.pool_copies
        return self.landing


def segment_bytes(total: float) -> int:
    """Return the size in bytes of one segment of a staged transfer of `total` bytes.

    The source packs one segment while the destination reads the previous segment. The size is `total` divided
    by `SEGMENTS`, but at least `SMALLEST_SEGMENT_BYTES` and at most `LARGEST_SEGMENT_BYTES`.

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
    """Return all methods that can transfer the cells of a route.

    A cell is the part of a block that is copied as one unit. An image is a cell packed into contiguous
    memory.

    Args:
        route: layers to transfer from one rank to another.
        costs: costs of the machine. `Costs.gap_bytes` is the longest gap that is read instead of skipped.
        max_image_bytes: maximum size of one image in bytes. Methods with larger images are left out.
        region_starts: first address of each registered region of the source. No read may cross these
            addresses. Empty if one region holds all pages.
        shared: True if the destination has mapped host memory of the source.

    Raises:
        ConfigError: a cell has too many runs for a direct transfer, and cannot be packed into an image of at
            most `max_image_bytes`.
    """
    found = []
    size = route.cell_bytes
    if route.run_count <= MAX_RUNS:
        found.append(TransferMethod(Strategy.DIRECT, Work(len(route.runs), size, bytes=size)))
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
        if shared:
            work = replace(work, read_bytes=0, shared=True)
            found.append(TransferMethod(Strategy.SHARED, work, image, landing))
    fitting = [method for method in found if method.image is None or method.image.stride <= max_image_bytes]
    if not fitting:
        raise ConfigError(
            f"cells of {size} bytes in {route.run_count} runs can only move packed, and staging memory "
            "has room "
            f"for cells of {max_image_bytes} bytes; raise staging_mib"
        )
    return tuple(fitting)


def choose_method(
    methods: Sequence[TransferMethod], cells: int, costs: Costs, strategy: Strategy | None = None
) -> int:
    """Return the index of the transfer method with the shortest expected duration.

    The shared strategy is considered only if READs are much slower than copies.

    Args:
        methods: methods to choose from, at least one.
        cells: number of cells (parts of blocks copied as one unit) to transfer.
        costs: costs of the machine.
        strategy: strategy to which the choice is limited, if any method has it; None to choose among all
            methods.
    """
    slow = costs.read_byte_seconds >= _SLOW_READS * costs.host_byte_seconds
    usual = [i for i, method in enumerate(methods) if slow or method.strategy is not Strategy.SHARED]
    wanted = [i for i, method in enumerate(methods) if method.strategy is strategy]
    allowed = wanted or usual or range(len(methods))
    return min(allowed, key=lambda i: methods[i].work.seconds(cells, costs))


def _fetch_image(route: Route, gap_bytes: int, region_starts: Sequence[int]) -> PackedImage | None:
    """Return the layout of images that the destination reads from the source and then unpacks.

    An image is a cell (part of a block) packed into contiguous memory, here in the byte order of the source.
    Return None if nothing is copied or an image would need too many reads.

    Args:
        route: layers to transfer from one rank to another.
        gap_bytes: length in bytes of the longest gap that is read instead of skipped. This limit is reduced
            until no read is longer than the distance between blocks, because it is never worth reading other
            blocks.
        region_starts: first address of each registered region of the source. No read may cross these
            addresses.
    """
    image = fetch_image(route.cell_copies, gap_bytes, region_starts)
    while image and gap_bytes and image.longest > route.src_stride:
        gap_bytes //= 4
        image = fetch_image(route.cell_copies, gap_bytes, region_starts)
    return image


def _read_count(image: PackedImage) -> int:
    """Return the number of reads (descriptors) of one image (packed cell)."""
    return sum(len(each.descriptors) for each in image.reads)


def _copies(parts: Sequence[PoolCopies]) -> tuple[int, int]:
    """Return (number of calls of the copy operation, number of copied runs) per cell (part of a block).

    Args:
        parts: strided copies that pack or unpack one cell.
    """
    copies = [copy for part in parts for copy in part.nests]
    return len(copies), sum(copy.run_count for copy in copies)


def _as_strided_copies(reads: Descriptors) -> tuple[StridedCopy, ...]:
    rows = zip(reads.src.tolist(), reads.dst.tolist(), reads.length.tolist(), strict=True)
    return fuse_copies(StridedCopy(*row) for row in rows)
