"""The meaning of the bytes of one page.

A *page* is the memory of one block in one layer. A `PageFormat` lists the *fields* of a page (``k``, ``v``,
``latent``, ``ssm``, ...). A `Field` is a logical tensor with named axes. An `Axis` gives the byte strides
between its elements, and the part of the whole model's axis that this rank holds (the global range).

Two engines can exchange a field if both use the same field name, axis names, axis totals and element size.
Strides, order of axes and ranges may differ: `planning.page_copy` converts between them.

Only the axis called ``token`` is special. It is divided into blocks, so a field with this axis can move
between engines with different block sizes. A field without it holds one value per block, such as a
*snapshot* (recurrent state at one position of the sequence) or opaque bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.errors import GeometryError

TOKEN = "token"

MAX_ELEMENTS = 1 << 20
"""Maximum number of elements of an axis on one rank.

Planning allocates memory for each element, and a peer may send any number. The limit bounds that memory.
"""

_SHARD = "shard"
"""Name of the axis that stores the rank number of an opaque page."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of a field in a page, with the elements that one rank holds.

    Nested loops enumerate the elements of the axis. Most axes have one loop. Two loops describe an axis that
    is not evenly spaced in memory. For example, the token axis has two loops if each block of the engine's
    block table consists of several smaller kernel blocks.

    >>> Axis("token", ((2, 4096), (16, 4))).offsets()[[0, 1, 15, 16]].tolist()
    [0, 4, 60, 4096]

    Attributes:
        name: name of the axis, the same in every engine.
        loops: (count, stride in bytes) of each loop, outermost first; the product of the counts is `count`.
        start: index of this rank's first element, counted over all ranks.
        total: number of elements over all ranks. If it is given as 0, it becomes `start` + `count`: this
            rank's last element is then the last element of the axis.
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
        """Number of elements of the axis on this rank."""
        return prod(count for count, _ in self.loops)

    @property
    def stop(self) -> int:
        """Index after this rank's last element of the axis, counted over all ranks."""
        return self.start + self.count

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the byte offset of every element on this rank, int64 of shape (count,)."""
        out = np.zeros(1, np.int64)
        for count, stride in self.loops:
            out = (out[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return out


@dataclass(frozen=True, slots=True)
class Field:
    """One logical tensor inside a page (memory of one block in one layer).

    Attributes:
        name: name of the field, the same in every engine.
        item_bytes: bytes of one element. An element is never split.
        offset: byte offset of this rank's first element from the start of the page.
        axes: named axes, outermost first. Two engines that transfer the field directly may order the axes
            differently. Stored chunks depend on the order, so all engines that share a store must use the
            same order.
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
        """Return the axis called `name`; None if the field has no such axis."""
        return next((axis for axis in self.axes if axis.name == name), None)

    @property
    def elements(self) -> int:
        """Number of elements of the field on this rank."""
        return prod(axis.count for axis in self.axes)

    @property
    def held(self) -> tuple[tuple[str, int, int], ...]:
        """Part of the field that this rank holds: (axis name, start, stop) of every sharded axis."""
        return tuple((a.name, a.start, a.stop) for a in self.axes if a.count != a.total)

    def extent(self) -> tuple[int, int]:
        """Return the byte range ``(first, end)`` of the field, relative to the start of the page."""
        low = high = self.offset
        for axis in self.axes:
            for count, stride in axis.loops:
                reach = (count - 1) * stride
                low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high + self.item_bytes


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of one page (memory of one block in one layer): its fields and its size.

    Attributes:
        content: id of the format of the bytes; for vLLM's attention layers, it contains the names of the
            attention backend and of the KV dtype. Fields of the same name can be transferred between pages
            with different ids. A page whose inner structure is unknown (opaque) can be copied only to a page
            with the same id.
        block_tokens: number of tokens per block; 0 for a page that is a snapshot of recurrent state.
        page_bytes: size of the page in bytes. The stride between blocks may be larger.
        fields: logical tensors in the page.
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
        """Total bytes of all elements of all fields."""
        return sum(field.elements * field.item_bytes for field in self.fields)

    @property
    def opaque(self) -> bool:
        """True if the meaning of some bytes is unknown, so that the page can only be copied whole."""
        return any(field.axis(_SHARD) for field in self.fields)


def opaque_page(
    content: str,
    block_tokens: int,
    run_bytes: int,
    rank: int,
    ranks: int,
    loops: tuple[tuple[int, int], ...] = (),
) -> PageFormat:
    """Return the format of a page (memory of one block in one layer) whose inner structure is unknown.

    Such a page can only be copied whole, to the same rank of an engine with the same number of ranks and the
    same block size. To enforce this, the format has an axis of length `ranks`, of which this rank holds one
    element, and it has no token axis.

    The format describes a page that is contiguous in memory as one element of `run_bytes` bytes, and a page
    in several pieces as one element per piece.

    Args:
        content: id of the format of the bytes, which must be the same in both engines.
        block_tokens: number of tokens per block; 0 for a snapshot (recurrent state at one position).
        run_bytes: bytes of one element, which is the whole page if the page is contiguous.
        rank: index of this rank, from 0 to `ranks` - 1; 0 if all ranks hold the same bytes.
        ranks: number of ranks that hold different bytes; 1 if all ranks hold the same bytes.
        loops: (count, stride in bytes) of each nested loop over the elements of a scattered page, outermost
            first; empty if the page is contiguous.
    """
    axes = [Axis(_SHARD, ((1, 0),), rank, ranks)]
    if loops:
        axes.append(Axis("stretch", loops))
    field = Field(f"opaque {content}", run_bytes, 0, tuple(axes))
    return PageFormat(content, block_tokens, field.extent()[1], (field,))
