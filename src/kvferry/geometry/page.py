"""The meaning of the bytes of one page.

Two engines can exchange a field if its name, axis names, axis totals and element size are equal. Strides,
order of axes and ranges may differ: `planning.cell_copy` converts between them. The axis ``token`` is divided
into blocks, so only a field with this axis can move between engines with different block sizes. Its elements
may stand for several tokens each; a field without it has one element per block. With context parallelism, the
axis has those of a block's tokens that this rank holds (`Interleave`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm, prod

import numpy as np
import numpy.typing as npt

from kvferry.common.errors import GeometryError
from kvferry.geometry.interleave import NOT_INTERLEAVED, Interleave

TOKEN = "token"

# A peer may send any number, and planning allocates memory for each element of an axis.
MAX_ELEMENTS = 1 << 20

# The axis that stores the rank number of an opaque page.
SHARD = "shard"


def loop_offsets(first: int, loops: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the offset of every iteration of nested loops of (count, stride), int64, innermost fastest."""
    out = np.array([first], np.int64)
    for count, stride in loops:
        out = (out[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return out


def join_loops(item_bytes: int, loops: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Join the loops of (count, stride in bytes) over contiguous items.

    Return bytes per contiguous run, and the loops over the runs, in ascending order of stride.

    >>> join_loops(2, [(4, 4096), (8, 32), (16, 2)])
    (256, [(4, 4096)])
    """
    run, outer = item_bytes, list[tuple[int, int]]()
    for count, stride in sorted(loops, key=lambda loop: abs(loop[1])):
        if not outer and stride == run:
            run *= count
        elif count > 1:
            outer.append((count, stride))
    return run, outer


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of a field in a page, with the elements that one rank holds.

    Two loops describe an axis that is not evenly spaced, such as the tokens of a block of kernel blocks.

    >>> Axis("token", ((2, 4096), (16, 4))).offsets()[[0, 1, 15, 16]].tolist()
    [0, 4, 60, 4096]
    """

    name: str
    loops: tuple[tuple[int, int], ...]  # (count, stride in bytes), outermost first
    start: int = 0  # index of this rank's first element, counted over all ranks
    total: int = 0  # elements over all ranks; 0 if this rank's last one is the last

    def __post_init__(self) -> None:
        if not self.loops or any(count < 1 for count, _ in self.loops):
            raise GeometryError(f"axis {self.name!r}: loops {self.loops} must have counts of at least 1")
        if self.count > MAX_ELEMENTS:
            raise GeometryError(
                f"axis {self.name!r}: {self.count} elements, at most {MAX_ELEMENTS} are planned"
            )
        if not self.total:
            object.__setattr__(self, "total", self.start + self.count)
        if self.start < 0 or self.start + self.count > self.total:
            raise GeometryError(
                f"axis {self.name!r}: holds [{self.start}, {self.start + self.count}) "
                f"of a total of {self.total}"
            )

    @property
    def count(self) -> int:
        return prod(count for count, _ in self.loops)

    @property
    def stop(self) -> int:
        return self.start + self.count

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the byte offset of every element on this rank, int64 of shape (count,)."""
        return loop_offsets(0, self.loops)


@dataclass(frozen=True, slots=True)
class Field:
    """One logical tensor inside a page: ``k``, ``v``, ``latent``, ``ssm``, ..."""

    name: str
    item_bytes: int  # of one element, which is never split
    offset: int  # byte offset of this rank's first element in the page
    # A transfer between engines converts the order of axes. Stored chunks depend on it, so all engines that
    # share a store must use one order.
    axes: tuple[Axis, ...]  # outermost first

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise GeometryError(f"field {self.name!r}: axis names {names} must differ")
        sharded = [axis.name for axis in self.axes if axis.count != axis.total]
        if len(sharded) > 1:
            raise GeometryError(f"field {self.name!r}: axes {sharded} are sharded, at most one can be")

    def axis(self, name: str) -> Axis | None:
        return next((axis for axis in self.axes if axis.name == name), None)

    @property
    def elements(self) -> int:
        return prod(axis.count for axis in self.axes)

    @property
    def held(self) -> tuple[tuple[str, int, int], ...]:
        """(axis name, start, stop) of every sharded axis."""
        return tuple((a.name, a.start, a.stop) for a in self.axes if a.count != a.total)

    def extent(self) -> tuple[int, int]:
        """Return the byte range of the field, half-open, relative to the start of the page."""
        low = high = self.offset
        for axis in self.axes:
            for count, stride in axis.loops:
                reach = (count - 1) * stride
                low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + self.item_bytes


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of one page. Opaque pages can move only to a page with the same `content`."""

    content: str  # id of the format of the bytes
    block_tokens: int  # 0 for a snapshot
    page_bytes: int  # may be less than the stride between blocks
    fields: tuple[Field, ...]
    interleave: Interleave = NOT_INTERLEAVED  # of the block's tokens

    def __post_init__(self) -> None:
        if not self.fields:
            raise GeometryError(f"page {self.content!r} has no fields")
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise GeometryError(f"page {self.content!r}: field names {names} must differ")
        for field in self.fields:
            low, high = field.extent()
            if low < 0 or high > self.page_bytes:
                raise GeometryError(
                    f"page {self.content!r}: field {field.name!r} reaches bytes [{low}, {high}) "
                    f"of a page of {self.page_bytes}"
                )
            token = field.axis(TOKEN)
            if token is not None and self.held_tokens % token.count:
                raise GeometryError(
                    f"page {self.content!r}: field {field.name!r} has {token.count} elements along its "
                    f"tokens; expected a divisor of the page's {self.held_tokens} tokens"
                )
        if self.interleave != NOT_INTERLEAVED:
            self._check_interleave()

    def _check_interleave(self) -> None:
        # The planner cannot divide other pages, so ranks that hold different ones need another axis for it.
        if without := [field.name for field in self.fields if field.axis(TOKEN) is None]:
            raise GeometryError(
                f"page {self.content!r}: fields {without} have no token axis; expected one where ranks "
                "divide the tokens"
            )
        interleave, each = self.interleave, lcm(*map(self.element_tokens, self.fields))
        if not self.block_tokens or self.block_tokens % interleave.period or interleave.size % each:
            raise GeometryError(
                f"page {self.content!r}: {interleave.ranks} ranks hold {interleave.size} tokens in turn of a "
                f"block's {self.block_tokens}; expected whole turns, of a multiple of {each} tokens"
            )

    @property
    def held_tokens(self) -> int:
        """Number of tokens of a block that this page holds."""
        return self.block_tokens // self.interleave.ranks

    @property
    def content_bytes(self) -> int:
        return sum(field.elements * field.item_bytes for field in self.fields)

    @property
    def opaque(self) -> bool:
        """True if the meaning of some bytes is unknown, so that the page can only be copied whole."""
        return any(field.axis(SHARD) for field in self.fields)

    def element_tokens(self, field: Field) -> int:
        """Return the number of tokens for which one element of a field stands; 0 in a snapshot."""
        token = field.axis(TOKEN)
        return self.held_tokens // token.count if token else self.block_tokens


def opaque_page(
    content: str,
    block_tokens: int,
    run_bytes: int,
    rank: int,
    ranks: int,
    loops: tuple[tuple[int, int], ...] = (),
) -> PageFormat:
    """Return the format of a page whose inner structure is unknown.

    `run_bytes` are those of one contiguous piece, the whole page without `loops`: (count, stride in bytes),
    outermost first. `rank` and `ranks` count those with different bytes: 0 and 1 if all ranks hold the same.
    """
    # This axis lets such a page move only to the same rank of an engine with as many ranks. Without a token
    # axis, it moves only between equal block sizes.
    axes = [Axis(SHARD, ((1, 0),), rank, ranks)]
    if loops:
        axes.append(Axis("stretch", loops))
    field = Field(f"opaque {content}", run_bytes, 0, tuple(axes))
    return PageFormat(content, block_tokens, field.extent()[1], (field,))


def whole_page(
    content: str,
    block_tokens: int,
    extents: Sequence[int],
    strides: Sequence[int],
    *,
    item_bytes: int,
    rank: int,
    ranks: int,
) -> PageFormat:
    """Return the format of a page that can only move whole, to a page of the same shape and strides.

    `extents` are kernel blocks per block, head slots, tokens and elements, and `strides` bytes along each.

    >>> page = whole_page("CODES", 16, (1, 2, 16, 8), (4096, 2048, 128, 4), item_bytes=4, rank=0, ranks=1)
    >>> page.content, page.fields[0].item_bytes
    ('CODES (2, 16, 8) at strides of 2048, 128, 4 bytes', 32)
    """
    run, loops = join_loops(item_bytes, zip(extents, strides, strict=True))
    shape, apart = tuple(extents[1:]), ", ".join(map(str, strides[1:]))
    kind = f"{content} {shape} at strides of {apart} bytes"
    return opaque_page(kind, block_tokens, run, rank, ranks, tuple(reversed(loops)))
