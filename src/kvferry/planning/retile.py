"""Two page formats to the loops that move one into the other.

Intersect what each field holds, cut tokens at the common divisor of the two block sizes (a *cell*), and
give for every cell the loops over what both sides hold. This is resharding, changing layout and changing
block size at once; none of them has code of its own.

The result is small (it is per page, not per block) and is computed once per pair of formats at handshake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from kvferry.errors import Incompatible
from kvferry.geometry.page import TOKEN, Axis, Field, PageFormat
from kvferry.planning.nest import Nest, fused, nests_of
from kvferry.planning.pieces import Int64s


@dataclass(frozen=True, slots=True)
class Retiled:
    """How pages of one format become pages of another.

    Cell ``c`` of a sequence (tokens ``[c·cell_tokens, (c+1)·cell_tokens)``) lies in source block
    ``c // src_cells`` and destination block ``c // dst_cells``, and moves by
    ``phases[c % len(phases)]``. A snapshot is one cell, its own block on both sides.

    Attributes:
        cell_tokens: tokens of a cell, 0 for a snapshot.
        src_cells, dst_cells: cells per block on each side.
        phases: the nests of a cell, by its index modulo the number of phases; offsets from the start of
            the page on each side.
    """

    cell_tokens: int
    src_cells: int
    dst_cells: int
    phases: tuple[tuple[Nest, ...], ...]


MAX_PHASES = 1024
"""Ways in which cells may lie in blocks on both sides before two block sizes are refused."""


def _phases(src_tokens: int, dst_tokens: int) -> int:
    return lcm(src_tokens, dst_tokens) // gcd(src_tokens, dst_tokens)


def differences(src: PageFormat, dst: PageFormat) -> list[str]:
    """Why pages of `src` cannot become pages of `dst`, a sentence each; empty if they can.

    Ranges do not count: that one rank holds only a part is what resharding is for.
    """
    if bool(src.block_tokens) != bool(dst.block_tokens):
        return [f"{src.content} holds tokens on one side and a snapshot on the other ({dst.content})"]
    ours, theirs = ({f.name: f for f in page.fields} for page in (dst, src))
    if ours.keys() != theirs.keys():
        here, there = _listed(ours), _listed(theirs)
        return [f"the peer's pages hold {there} ({src.content}), ours hold {here} ({dst.content})"]
    found = []
    if src.block_tokens and _phases(src.block_tokens, dst.block_tokens) > MAX_PHASES:
        found.append(
            f"blocks of {src.block_tokens} tokens there and {dst.block_tokens} here share no useful divisor"
        )
    for name, field in ours.items():
        other = theirs[name]
        if field.item_bytes != other.item_bytes:
            found.append(
                f"field {name!r}: elements of {other.item_bytes} bytes there, {field.item_bytes} here"
            )
        here, there = (_listed(a.name for a in f.axes) for f in (field, other))
        if here != there:
            found.append(f"field {name!r}: axes {there} there, {here} here")
            continue
        if field.axis(TOKEN) is None and src.block_tokens != dst.block_tokens:
            found.append(
                f"field {name!r}: one value per block, which has {src.block_tokens} tokens there, "
                f"{dst.block_tokens} here"
            )
        for axis in field.axes:
            match = other.axis(axis.name)
            if axis.name != TOKEN and match is not None and match.total != axis.total:
                found.append(f"field {name!r}: axis {axis.name!r} is {match.total} there, {axis.total} here")
    return found


def retile(src: PageFormat, dst: PageFormat, fields: frozenset[str] | None = None) -> Retiled:
    """The loops over what a page of `dst` can take from a page of `src`, cell by cell.

    Blocks of 4 tokens to blocks of 6, an element of 2 bytes per token: cells of 2 tokens, 6 phases of them.

    >>> def page(tokens):
    ...     field = Field("kv", 2, 0, (Axis("token", ((tokens, 2),)),))
    ...     return PageFormat("kv", tokens, 2 * tokens, (field,))
    >>> moved = retile(page(4), page(6))
    >>> moved.cell_tokens, moved.src_cells, moved.dst_cells
    (2, 2, 3)
    >>> [(nest.src, nest.dst, nest.run) for (nest,) in moved.phases]
    [(0, 0, 4), (4, 4, 4), (0, 8, 4), (4, 0, 4), (0, 4, 4), (4, 8, 4)]

    Args:
        src: format of the pages read.
        dst: format of the pages written.
        fields: names of the fields to move; None moves all. Fields whose held ranges do not meet give
            nothing.

    Raises:
        Incompatible: the formats do not hold the same fields.
    """
    if found := differences(src, dst):
        raise Incompatible(found)
    pairs = [(src_f, f) for f in dst.fields for src_f in src.fields if src_f.name == f.name]
    if fields is not None:
        pairs = [(a, b) for a, b in pairs if b.name in fields]
    if not dst.block_tokens:
        return Retiled(0, 1, 1, (_nests(pairs, None),))
    cell = gcd(src.block_tokens, dst.block_tokens)
    src_cells, dst_cells = src.block_tokens // cell, dst.block_tokens // cell
    phases = tuple(
        _nests(pairs, (c % src_cells * cell, c % dst_cells * cell, cell))
        for c in range(_phases(src.block_tokens, dst.block_tokens))
    )
    return Retiled(cell, src_cells, dst_cells, phases)


def _nests(pairs: Sequence[tuple[Field, Field]], cell: tuple[int, int, int] | None) -> tuple[Nest, ...]:
    """Everything that both sides hold of some fields, of the tokens of one cell."""
    found = list[Nest]()
    for src, dst in pairs:
        src_axes = {axis.name: axis for axis in src.axes}
        axes = [_common(src_axes[axis.name], axis, cell) for axis in dst.axes]
        found += nests_of(dst.item_bytes, src.offset, dst.offset, axes)
    return fused(found)


def _common(src: Axis, dst: Axis, cell: tuple[int, int, int] | None) -> tuple[Int64s, Int64s]:
    """Offsets on both sides of the indices that both hold, in the same order."""
    if dst.name == TOKEN and cell is not None:
        src_first, dst_first, count = cell
        return src.offsets()[src_first : src_first + count], dst.offsets()[dst_first : dst_first + count]
    low, high = max(src.start, dst.start), min(src.stop, dst.stop)
    high = max(low, high)
    return src.offsets()[low - src.start : high - src.start], dst.offsets()[
        low - dst.start : high - dst.start
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
