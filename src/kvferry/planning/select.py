"""Selection of the tokens that a request needs of a group, and so of cells and blocks.

Block tables are lists of block ids by position: entry ``i`` holds tokens ``[i·block, (i+1)·block)``. Id 0
is the null block: the engine keeps nothing there. The table of a state group is the one block that holds
the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.descriptors import Int64s
from kvferry.planning.template import Route

NULL_BLOCK = 0

STATE_BLOCKS = 2
"""Maximum number of blocks of a group of recurrent state: the loaded snapshot and the running state."""


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """The tokens of a prompt that a load moves.

    A prefix may come in parts, from several sources. Each part brings its tokens of layers that see all
    tokens. Other layers need only the end of the prefix, which comes with the last part.

    Attributes:
        local_tokens: tokens that the destination has before the load, from the start of the prompt.
        total: tokens that it has after the load.
        prompt: tokens of the whole prompt.
        part: tokens ``[first, last)`` of this part; None for all.
    """

    local_tokens: int
    total: int
    prompt: int
    part: tuple[int, int] | None = None

    @property
    def next_token(self) -> int:
        """Position of the first token that the destination computes.

        The engine always computes the last prompt token, to sample from it, even if the cache holds it. So
        the window of that token decides what is needed, not the window of the token after it.
        """
        return min(self.total, self.prompt - 1)

    @property
    def begins(self) -> int:
        """First token that moves, in layers that attend to all tokens."""
        return self.local_tokens if self.part is None else max(self.local_tokens, self.part[0])

    @property
    def ends(self) -> int:
        """End of the tokens that move, in layers that attend to all tokens."""
        return self.total if self.part is None else self.part[1]


Position = TypeVar("Position", int, Int64s)


def attends_to_all(kind: GroupKind) -> bool:
    """Return whether a layer of this kind attends to every earlier token."""
    return kind in (GroupKind.FULL, GroupKind.MLA)


def first_attended(kind: GroupKind, attention_span: int, next_token: Position) -> Position:
    """Return the first token that `next_token` attends to. Below 0, it attends to all tokens.

    Takes one position or an array of them.

    >>> first_attended(GroupKind.SLIDING, 24, 63), first_attended(GroupKind.CHUNKED, 32, 63)
    (40, 32)
    """
    if kind is GroupKind.SLIDING:
        return next_token - attention_span + 1
    if kind is GroupKind.CHUNKED:
        return next_token // attention_span * attention_span
    return next_token * 0


def needed_tokens(kind: GroupKind, attention_span: int, span: LoadSpan) -> tuple[int, int]:
    """Return the tokens ``[low, high)`` that a continuation needs and the destination lacks.

    >>> needed_tokens(GroupKind.SLIDING, 24, LoadSpan(0, total=64, prompt=64))   # next: 63, sees 40..63
    (40, 64)
    >>> needed_tokens(GroupKind.FULL, 0, LoadSpan(local_tokens=16, total=64, prompt=64))
    (16, 64)
    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> needed_tokens(GroupKind.FULL, 0, head), needed_tokens(GroupKind.SLIDING, 24, head)
    ((16, 48), (48, 48))

    The snapshot of a state group is the state after ``high`` tokens; it is needed whenever anything is.
    """
    if attends_to_all(kind):
        low = span.begins
    elif span.ends < span.total:
        low = span.ends
    else:
        low = max(span.local_tokens, first_attended(kind, attention_span, span.next_token))
    return min(low, span.ends), span.ends


def first_independent(kind: GroupKind, attention_span: int, end: int) -> int:
    """Return the first token that attends to nothing before `end`, in a window or chunked attention.

    >>> first_independent(GroupKind.SLIDING, 24, 64), first_independent(GroupKind.CHUNKED, 32, 48)
    (87, 64)
    """
    if kind is GroupKind.CHUNKED:
        return -(-end // attention_span) * attention_span
    return end + attention_span - 1


def partial_block(
    kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan, alignment_tokens: int
) -> int | None:
    """Return the position of the destination block whose beginning is not loaded; None if there is none.

    Only the first block of a window can be one: the source need not keep tokens before the window.

    >>> span = LoadSpan(0, 300, 300)   # the next token, 299, sees 200..299; content begins at 192
    >>> partial_block(GroupKind.SLIDING, 100, 128, span, 64)
    1
    >>> partial_block(GroupKind.SLIDING, 100, 128, span, 128) is None
    True

    Args:
        kind, attention_span, block_tokens: properties of the destination's group.
        span: the tokens that are loaded.
        alignment_tokens: loaded content begins at the last multiple of it, at or before what is needed.
    """
    if not attention_span:
        return None
    low, high = needed_tokens(kind, attention_span, span)
    first = low // block_tokens
    loaded_from = low // alignment_tokens * alignment_tokens
    return first if low < high and max(first * block_tokens, span.local_tokens) < loaded_from else None


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one route that a request moves, in ascending order.

    Attributes:
        src_block, dst_block: block ids, int64 of shape (n,).
        number: index of each cell in the sequence, which gives its place in its block on either side; int64
            of shape (n,).
    """

    src_block: Int64s
    dst_block: Int64s
    number: Int64s

    def __len__(self) -> int:
        return len(self.src_block)

    def __getitem__(self, part: slice) -> Cells:
        return Cells(self.src_block[part], self.dst_block[part], self.number[part])


def select_cells(
    route: Route, kind: GroupKind, attention_span: int, span: LoadSpan, src_table: Int64s, dst_table: Int64s
) -> Cells:
    """Return the cells of `route` that a request moves.

    Cells move whole, so the last one carries tokens past `span.total`, which nothing reads.

    Args:
        route: layers and their page copy.
        kind, attention_span: properties of the destination's group.
        span: the tokens that are moved.
        src_table, dst_table: block ids by position, int64.

    Raises:
        TransferError: a needed block is missing, null or not in the pool on either side, or the destination's
            prefix ends inside a cell (writing the rest would overwrite blocks that others read).
    """
    low, high = needed_tokens(kind, attention_span, span)
    if low >= high:
        empty = np.zeros(0, np.int64)
        return Cells(empty, empty, empty)
    if route.cell_tokens == 0:
        if len(src_table) != 1 or len(dst_table) != 1:
            raise TransferError(
                f"a state group moves one block, the tables name {len(src_table)} and {len(dst_table)}"
            )
        return _cells(route, src_table, dst_table, np.zeros(1, np.int64))
    first = low // route.cell_tokens
    if first * route.cell_tokens < span.local_tokens:
        raise TransferError(
            f"the local prefix ends at token {span.local_tokens}, inside the cell of "
            f"{route.cell_tokens} tokens from {first * route.cell_tokens}; it must end on one"
        )
    check_part_edges(route, kind, span)
    cells = np.arange(first, -(-high // route.cell_tokens), dtype=np.int64)
    src_at, dst_at = cells // route.src_cells, cells // route.dst_cells
    for table, at, side in ((src_table, src_at, "source"), (dst_table, dst_at, "destination")):
        if at[-1] >= len(table):
            raise TransferError(
                f"tokens [{low}, {high}) need block {at[-1]} of the {side}'s table, which has {len(table)}"
            )
    return _cells(route, src_table[src_at], dst_table[dst_at], cells)


def partly_written_blocks(
    route: Route, kind: GroupKind, attention_span: int, span: LoadSpan, dst_table: Int64s
) -> Int64s:
    """Return destination blocks that a load fills in part and that hold nothing of this prompt yet.

    Attention reads the rest of such a block with weight 0, but a NaN left there by its last owner would still
    spread.

    Returns:
        Ids, int64, at most two: blocks at both ends.
    """
    low, high = needed_tokens(kind, attention_span, span)
    if low >= high or route.dst_cells == 1 or not route.cell_tokens:
        return dst_table[:0]
    first, last = low // route.cell_tokens, -(-high // route.cell_tokens)
    block_tokens = route.cell_tokens * route.dst_cells
    partial = {
        b
        for b, at in ((first // route.dst_cells, first), ((last - 1) // route.dst_cells, last))
        if at % route.dst_cells
    }
    return dst_table[sorted(b for b in partial if b * block_tokens >= span.local_tokens)]


def check_part_edges(route: Route, kind: GroupKind, span: LoadSpan) -> None:
    """Check that only one part of a prefix writes each block of the destination.

    Raises:
        TransferError: a part begins or ends inside a block. It would clear tokens of the other part.
    """
    if span.part is None or not attends_to_all(kind):
        return
    block = route.cell_tokens * route.dst_cells
    for at in ({span.begins} - {span.local_tokens}) | ({span.ends} - {span.total}):
        if at % block:
            raise TransferError(
                f"a part of a prefix begins or ends at token {at}, inside a block; "
                f"expected a multiple of {block}"
            )


def _cells(route: Route, src: Int64s, dst: Int64s, number: Int64s) -> Cells:
    """Return the cells after checking the block ids. An id past the pool would index another row's bytes."""
    for ids, blocks, side in ((src, route.src_blocks, "source"), (dst, route.dst_blocks, "destination")):
        if (ids == NULL_BLOCK).any():
            raise TransferError(f"the {side} no longer holds a block that the request needs (null block)")
        if ids.min() < 0 or ids.max() >= blocks:
            raise TransferError(
                f"the {side}'s table names blocks {ids.min()} to {ids.max()}, its pool has {blocks}"
            )
    return Cells(src, dst, number)


def blocks_needed(
    kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan, table: Int64s
) -> Int64s:
    """Return ids of the blocks of `table` that `needed_tokens` tokens lie in; int64, ascending by position.

    Args:
        kind, attention_span, block_tokens: properties of the group.
        span: the tokens that move.
        table: block ids by position; of a state group, the one block with the snapshot.
    """
    low, high = needed_tokens(kind, attention_span, span)
    if low >= high:
        return table[:0]
    if kind is GroupKind.STATE:
        return table
    return table[low // block_tokens : -(-high // block_tokens)]


def unwritten_blocks_needed(
    kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan, table: Int64s
) -> Int64s:
    """Return ids of the blocks that `needed_tokens` tokens lie in and that hold nothing of this prompt yet.

    >>> table = np.arange(10, 16)
    >>> unwritten_blocks_needed(GroupKind.FULL, 0, 16, LoadSpan(24, 64, prompt=64), table).tolist()
    [12, 13]

    Args:
        kind, attention_span, block_tokens, span, table: as for `blocks_needed`.
    """
    ids = blocks_needed(kind, attention_span, block_tokens, span, table)
    if kind is not GroupKind.STATE:  # its snapshot is written as a whole
        first = needed_tokens(kind, attention_span, span)[0] // block_tokens
        ids = ids[int(first * block_tokens < span.local_tokens) :]
    found: Int64s = ids[ids != NULL_BLOCK]
    return found


def writable_blocks(kind: GroupKind, block_tokens: int, span: LoadSpan) -> slice:
    """Return the positions of a group's blocks that a load may write.

    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> writable_blocks(GroupKind.FULL, 16, head), writable_blocks(GroupKind.SLIDING, 16, head)
    (slice(1, 3, None), slice(1, 0, None))
    """
    last = span.ends == span.total
    if attends_to_all(kind):
        return slice(span.begins // block_tokens, None if last else -(-span.ends // block_tokens))
    if kind is GroupKind.STATE:
        return slice(0, None if last else 0)
    return slice(span.local_tokens // block_tokens, None if last else 0)


def max_writable_blocks(kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan) -> int:
    """Return the maximum number of blocks that a load may write in a group: `writable_blocks` without nulls.

    >>> span = LoadSpan(local_tokens=16, total=64, prompt=65)
    >>> max_writable_blocks(GroupKind.FULL, 0, 16, span), max_writable_blocks(GroupKind.SLIDING, 20, 16, span)
    (3, 2)
    """
    if not attends_to_all(kind) and span.ends != span.total:
        return 0
    if kind is GroupKind.STATE:
        return STATE_BLOCKS
    first = (
        span.begins
        if attends_to_all(kind)
        else max(span.local_tokens, first_attended(kind, attention_span, span.total))
    )
    return -(-span.ends // block_tokens) - first // block_tokens
