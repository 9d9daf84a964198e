"""Cell copies: the strided copies of one cell, and the offsets of all cells in a block.

Blocks of 784 and of 400 tokens, for example, have 49 and 25 cells of 16 tokens. The offset of a cell in its
block depends on one side only, so memory and time grow with the sum of both numbers, not with their product.
Fields whose cells have equal offsets share a cell copy, such as K and V that are packed per token.

With context parallelism, ranks take turns along the tokens (`geometry.interleave`). A cell then holds either
whole rounds of turns, so that a rank has the same tokens of every cell, or tokens of one turn, so that a rank
has all of the cell or nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

from kvferry.common.errors import Incompatible
from kvferry.geometry.interleave import NOT_INTERLEAVED, Interleave
from kvferry.geometry.page import TOKEN, Axis, Field, PageFormat
from kvferry.planning.descriptors import Descriptors, Int64s
from kvferry.planning.strided_copy import StridedCopy, expand_copies, fuse_copies, strided_copies

# Byte offset of every cell of a block, relative to the cell with the lowest address. All are at least 0.
Offsets = tuple[int, ...]

# Offsets for a block that consists of one cell.
ONE_CELL: Offsets = (0,)


@dataclass(frozen=True)
class CellCopy:
    """The `copies` of the cell with offset 0 on both sides, and the offsets at which to repeat them."""

    src_offsets: Offsets
    dst_offsets: Offsets
    copies: tuple[StridedCopy, ...]

    @cached_property
    def descriptors(self) -> Descriptors:
        return expand_copies(self.copies)


@dataclass(frozen=True, slots=True)
class PoolCopies:
    """Copies, of the cell with offset 0, between the blocks of a pool and packed memory."""

    at: Offsets
    # Messages between engines contain this name (`transport.gather_messages`), so it must not change.
    nests: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PoolDescriptors:
    """Runs, of the cell with offset 0, between the blocks of a pool and packed memory."""

    at: Offsets
    descriptors: Descriptors


def merge_cell_copies(parts: Iterable[CellCopy]) -> tuple[CellCopy, ...]:
    """Merge all `CellCopy` objects with equal offsets on both sides, and leave out those that copy nothing.

    >>> k, v = (CellCopy((0, 8), (0,), (StridedCopy(at, at, 4),)) for at in (0, 4))
    >>> merge_cell_copies([k, v, CellCopy((0, 3), (0,), ())])
    (CellCopy(src_offsets=(0, 8), dst_offsets=(0,), copies=(StridedCopy(src=0, dst=0, run=8, loops=()),)),)
    """
    found = defaultdict[tuple[Offsets, Offsets], list[StridedCopy]](list)
    for part in parts:
        if part.copies:
            found[part.src_offsets, part.dst_offsets] += part.copies
    return tuple(CellCopy(*at, fuse_copies(copies)) for at, copies in found.items())


def split_tokens(src: Int64s, dst: Int64s) -> Iterator[tuple[Offsets, Offsets, Int64s, Int64s]]:
    """Split the tokens of a cell into groups, so that one `CellCopy` can describe each group.

    `src` and `dst` are the byte offsets of the tokens to copy of every cell of a block on each side, int64 of
    shape (cells, tokens). Yield the two sides' offsets of `CellCopy`, and the byte offsets of the group's
    tokens in the cell with offset 0, int64.
    """
    cells = (src, dst)
    steps = np.concatenate([side - side[0] for side in cells])
    # Tokens share a `CellCopy` only if they have the same distances from cell to cell. All tokens of a cell
    # do, unless a block consists of kernel blocks that end inside cells.
    kinds = np.zeros(steps.shape[1], np.int64)
    if (steps != steps[:, :1]).any():
        _, kinds = np.unique(steps, axis=1, return_inverse=True)
    for kind in dict.fromkeys(kinds.reshape(-1).tolist()):
        tokens = np.flatnonzero(kinds == kind)
        at, first = [], []
        for side in cells:
            step = side[:, tokens[0]] - side[0, tokens[0]]
            # Offsets are relative to the lowest cell, which is the first one unless addresses descend.
            at.append(tuple((step - step.min()).tolist()))
            first.append(side[0, tokens] + step.min())
        yield at[0], at[1], first[0], first[1]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The copy from pages of one format to pages of another format.

    Cell ``c`` of a sequence holds the tokens ``[c·cell_tokens, (c+1)·cell_tokens)``. Each side numbers those
    that it holds, ``n = interleave.index_of(c)``. At the source, this is cell ``n % src_cells`` of block
    ``n // src_cells``, and likewise at the destination. A snapshot is one cell of 0 tokens. The byte offsets
    of `cell_copies` are from the start of the page.
    """

    cell_tokens: int
    src_cells: int  # per page
    dst_cells: int
    cell_copies: tuple[CellCopy, ...]
    src_interleave: Interleave = NOT_INTERLEAVED  # of the cells of a sequence
    dst_interleave: Interleave = NOT_INTERLEAVED


def differences(src: PageFormat, dst: PageFormat) -> list[str]:
    """Return the reasons why pages of `src` cannot be copied to pages of `dst`, one sentence each."""
    if bool(src.block_tokens) != bool(dst.block_tokens):
        return [f"{src.content} holds tokens on one side and a snapshot on the other ({dst.content})"]
    ours, theirs = ({f.name: f for f in page.fields} for page in (dst, src))
    if ours.keys() != theirs.keys():
        here, there = _listed(ours), _listed(theirs)
        return [f"the peer's pages hold {there} ({src.content}), ours hold {here} ({dst.content})"]
    found = []
    for name, field in ours.items():
        other = theirs[name]
        if field.item_bytes != other.item_bytes:
            found.append(
                f"field {name!r}: elements of {other.item_bytes} bytes there, {field.item_bytes} here"
            )
        here, there = (_listed(a.name for a in f.axes if a.name != TOKEN) for f in (field, other))
        if here != there:
            found.append(f"field {name!r}: axes {there or 'none'} there, {here or 'none'} here")
            continue
        if (per := src.element_tokens(other)) != dst.element_tokens(field):
            found.append(
                f"field {name!r}: one value per {per} tokens there, per {dst.element_tokens(field)} here"
            )
        # Ranges of an axis such as heads may differ, because a transfer can reshard. Its total may not.
        for axis in field.axes:
            match = other.axis(axis.name)
            if axis.name != TOKEN and match is not None and match.total != axis.total:
                found.append(f"field {name!r}: axis {axis.name!r} is {match.total} there, {axis.total} here")
    return found


def plan_page_copy(src: PageFormat, dst: PageFormat, fields: frozenset[str] | None = None) -> PageCopy:
    """Compute the copy of a cell from a page of format `src` to a page of format `dst`.

    Example: blocks of 4 tokens are copied to blocks of 6, so cells have 2. A token is one element of 2 bytes.

    >>> def page(tokens):
    ...     field = Field("kv", 2, 0, (Axis("token", ((tokens, 2),)),))
    ...     return PageFormat("kv", tokens, 2 * tokens, (field,))
    >>> moved = plan_page_copy(page(4), page(6))
    >>> moved.cell_tokens, moved.src_cells, moved.dst_cells
    (2, 2, 3)
    >>> moved.cell_copies[0]
    CellCopy(src_offsets=(0, 4), dst_offsets=(0, 4, 8), copies=(StridedCopy(src=0, dst=0, run=4, loops=()),))

    `fields` are the names of those to copy; None for all. A field of which the two sides hold disjoint parts
    is left out. Raise Incompatible, with all `differences`, if there are any.
    """
    if found := differences(src, dst):
        raise Incompatible(found)
    pairs = [(src_f, f) for f in dst.fields for src_f in src.fields if src_f.name == f.name]
    if fields is not None:
        pairs = [(a, b) for a, b in pairs if b.name in fields]
    cell = _cell_tokens(src, dst)
    sides = _Side.of(src, cell), _Side.of(dst, cell)
    cell_copies = merge_cell_copies(
        copy for a, b in pairs for copy in _field_copies(a, b, sides, dst.element_tokens(b))
    )
    src_side, dst_side = sides
    return PageCopy(cell, src_side.cells, dst_side.cells, cell_copies, src_side.of_cells, dst_side.of_cells)


def _cell_tokens(src: PageFormat, dst: PageFormat) -> int:
    """Return the largest possible number of tokens of a cell; 0 for snapshots.

    Two ranks hold blocks of 32 tokens, in turns of 16 tokens or of one. The other side has blocks of 24:

    >>> def page(tokens, *interleave):
    ...     field = Field("kv", 2, 0, (Axis("token", ((tokens // Interleave(*interleave).ranks, 2),)),))
    ...     return PageFormat("kv", tokens, 2 * tokens, (field,), Interleave(*interleave))
    >>> _cell_tokens(page(32, 0, 2, 16), page(24)), _cell_tokens(page(32, 0, 2, 1), page(24))
    (8, 8)
    """
    # Both block sizes are whole multiples of the greatest common divisor, so no cell crosses a block's end.
    # Each block and turn is a multiple of the tokens per element too, so no cell splits an element.
    cell, sides = gcd(src.block_tokens, dst.block_tokens), (src.interleave, dst.interleave)
    while split := [one.size for one in sides if cell % one.period and one.size % cell]:
        cell = gcd(cell, *split)
    return cell


@dataclass(frozen=True, slots=True)
class _Side:
    """How the pages of one side hold the cells of a sequence. Ranks divide either cells or their tokens."""

    cells: int  # per page
    cell_tokens: int
    of_cells: Interleave  # which cells a page holds
    of_tokens: Interleave  # which tokens of each of them

    @classmethod
    def of(cls, page: PageFormat, cell: int) -> _Side:
        interleave = page.interleave
        if not cell:
            return cls(1, 0, NOT_INTERLEAVED, NOT_INTERLEAVED)
        if cell % interleave.period == 0:
            return cls(page.block_tokens // cell, cell, NOT_INTERLEAVED, interleave)
        return cls(
            page.held_tokens // cell, cell, replace(interleave, size=interleave.size // cell), NOT_INTERLEAVED
        )

    def elements(self, each: int) -> Int64s:
        """Return the elements of a cell that a page holds, int64 of shape (n,); `each` stands for tokens."""
        interleave = self.of_tokens
        if interleave != NOT_INTERLEAVED:
            interleave = replace(interleave, size=interleave.size // each)
        return interleave.held(self.cell_tokens // (each or 1) // interleave.ranks if self.cell_tokens else 1)


def _field_copies(src: Field, dst: Field, sides: tuple[_Side, _Side], each: int) -> Iterator[CellCopy]:
    axes = [_common(_axis(src, axis.name), axis) for axis in dst.axes if axis.name != TOKEN]
    held = [side.elements(each) for side in sides]
    _, *both = np.intersect1d(held[0], held[1], assume_unique=True, return_indices=True)
    offsets = [
        _token_offsets(field).reshape(-1, len(elements))[:, common]
        for field, elements, common in zip((src, dst), held, both, strict=True)
    ]
    for src_offsets, dst_offsets, *tokens in split_tokens(*offsets):
        found = strided_copies(dst.item_bytes, src.offset, dst.offset, [*axes, (tokens[0], tokens[1])])
        yield CellCopy(src_offsets, dst_offsets, tuple(found))


def _axis(field: Field, name: str) -> Axis:
    return next(axis for axis in field.axes if axis.name == name)


def _token_offsets(field: Field) -> Int64s:
    """Return the byte offset of each element along the tokens of a block; 0 for the only one without them."""
    token = field.axis(TOKEN)
    return token.offsets() if token else np.zeros(1, np.int64)


def _common(src: Axis, dst: Axis) -> tuple[Int64s, Int64s]:
    """Return the byte offsets at the source and at the destination of the elements that both sides hold."""
    low, high = max(src.start, dst.start), min(src.stop, dst.stop)
    # Without a common range, both slices must be empty. A negative length would wrap around.
    high = max(low, high)
    here, there = (side.offsets()[low - side.start : high - side.start] for side in (dst, src))
    return there, here


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
