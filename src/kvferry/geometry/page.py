"""The meaning of the bytes of one page.

A *page* is the bytes of one block in one layer. A `PageFormat` names its *fields* (`k`, `v`, `latent`, `ssm`,
...); a `Field` is a logical tensor with named axes, and an `Axis` says where its elements lie (byte strides)
and which part of the whole model's axis they are (the global range). Two engines agree on a field when they
agree on names and totals; strides, order of axes and ranges may all differ, and `planning.page_copy` bridges
them.

Only the axis called ``token`` is special: blocks divide it, so a field that has it can move between engines
of different block sizes. A field without it (recurrent state, opaque bytes) is one snapshot per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.errors import GeometryError

TOKEN = "token"

MAX_ELEMENTS = 1 << 20
"""Maximum elements of an axis on one rank.

Planning needs memory for each, and a peer may claim any number.
"""

_SHARD = "shard"
"""Name of the axis of an opaque page that identifies its rank."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of a field, as one rank holds it inside one page.

    Index ``i`` of the axis is a mixed-radix number over `loops`, outermost first, so an axis may be cut in
    two places (a manager block made of kernel blocks has two token loops).

    >>> Axis("token", ((2, 4096), (16, 4))).offsets()[[0, 1, 15, 16]].tolist()
    [0, 4, 60, 4096]

    Attributes:
        name: name on both sides.
        loops: (count, stride in bytes), outermost first; the product of counts is `count`.
        start: global index of the first element held.
        total: length of the axis over all ranks; 0 means `count` (nothing is sharded).
    """

    name: str
    loops: tuple[tuple[int, int], ...]
    start: int = 0
    total: int = 0

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
        """Number of elements held."""
        return prod(count for count, _ in self.loops)

    @property
    def stop(self) -> int:
        """Global index after the last element held."""
        return self.start + self.count

    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte offset of every element held: int64 of shape (count,)."""
        out = np.zeros(1, np.int64)
        for count, stride in self.loops:
            out = (out[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return out


@dataclass(frozen=True, slots=True)
class Field:
    """One logical tensor inside a page.

    Attributes:
        name: name on both sides.
        item_bytes: bytes of one element; never split.
        offset: byte offset of the first element held, from the start of the page.
        axes: its named axes. Their order carries no meaning between engines, but the canonical form of a
            chunk keeps it: a content adapter names axes in the same order everywhere, the fastest last.
    """

    name: str
    item_bytes: int
    offset: int
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise GeometryError(f"field {self.name!r}: axis names {names} must differ")
        sharded = [axis.name for axis in self.axes if axis.count != axis.total]
        if len(sharded) > 1:
            raise GeometryError(f"field {self.name!r}: axes {sharded} are sharded, at most one can be")

    def axis(self, name: str) -> Axis | None:
        """Return the axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)

    @property
    def elements(self) -> int:
        """Number of elements held."""
        return prod(axis.count for axis in self.axes)

    @property
    def held(self) -> tuple[tuple[str, int, int], ...]:
        """(axis, start, stop) of every sharded axis: the part of the field that this rank holds."""
        return tuple((a.name, a.start, a.stop) for a in self.axes if a.count != a.total)

    def extent(self) -> tuple[int, int]:
        """Return the first byte of the field and the byte after its last, from the start of the page."""
        low = high = self.offset
        for axis in self.axes:
            for count, stride in axis.loops:
                reach = (count - 1) * stride
                low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + self.item_bytes


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of one page.

    Attributes:
        content: id of its content adapter (backend, instruction set, KV dtype). Fields of the same name in
            pages of different content ids mean the same; an opaque page only matches its own id.
        block_tokens: tokens of a block of this page, 0 for a page that is a snapshot (recurrent state).
        page_bytes: bytes of a page that carry content; the stride between blocks may be larger.
        fields: the logical tensors in it.
    """

    content: str
    block_tokens: int
    page_bytes: int
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise GeometryError(f"page {self.content!r} has no fields")
        for field in self.fields:
            low, high = field.extent()
            if low < 0 or high > self.page_bytes:
                raise GeometryError(
                    f"page {self.content!r}: field {field.name!r} reaches bytes [{low}, {high}) "
                    f"of a page of {self.page_bytes}"
                )
            token = field.axis(TOKEN)
            if token is not None and token.count != self.block_tokens:
                raise GeometryError(
                    f"page {self.content!r}: field {field.name!r} has {token.count} tokens, "
                    f"the block has {self.block_tokens}"
                )

    @property
    def content_bytes(self) -> int:
        """Bytes of all elements of all fields."""
        return sum(field.elements * field.item_bytes for field in self.fields)

    @property
    def opaque(self) -> bool:
        """True if the meaning of some bytes is unknown (`opaque_page`)."""
        return any(field.axis(_SHARD) for field in self.fields)


def opaque_page(
    content: str,
    block_tokens: int,
    run_bytes: int,
    rank: int,
    ranks: int,
    loops: tuple[tuple[int, int], ...] = (),
) -> PageFormat:
    """Describe a page of unknown interior.

    It moves whole, to the same rank of an engine with equally many ranks.

    The interior is one element, or several if a layout scatters the page. A sharded axis of length `ranks`
    identifies its rank. It has no token axis, so it cannot be converted to another block size.

    Args:
        content: id of the bytes' meaning; both sides must have the same.
        block_tokens: tokens of a block, 0 for a snapshot.
        run_bytes: bytes of an element; of the whole page if it is contiguous.
        rank: number of this shard.
        ranks: number of shards; 1 if all ranks hold the same bytes.
        loops: (count, stride) over the elements of a scattered page, outermost first.
    """
    axes = [Axis(_SHARD, ((1, 0),), rank, ranks)]
    if loops:
        axes.append(Axis("stretch", loops))
    field = Field(f"opaque {content}", run_bytes, 0, tuple(axes))
    return PageFormat(content, block_tokens, field.extent()[1], (field,))
