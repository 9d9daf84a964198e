"""Selection of the tokens of a KV cache group that a request needs, and of their blocks and cells.

A block table is a list of block ids by position: entry ``i`` holds the tokens ``[i·block, (i+1)·block)``. Id
0 is the null block, which holds no tokens. The table of a state group has one entry: the block that holds the
*snapshot* (recurrent state at one position). A *cell* is the part of a block that is copied as one unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from kvferry.errors import TransferError
from kvferry.geometry import GroupKind
from kvferry.planning.descriptors import Int64s
from kvferry.planning.template import Route

NULL_BLOCK = 0
"""Id of the null block, which holds no tokens."""

STATE_BLOCKS = 2
"""Maximum number of blocks that a load may write in a state group: the loaded snapshot and the running
state."""


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """The tokens of a prompt that a load transfers.

    Several sources may each load a part of a prefix. For layers that attend to all tokens, each part
    transfers its own tokens. Other layers need only the end of the prefix, which the last part transfers.

    Attributes:
        local_tokens: number of tokens that the destination has before the load, from the start of the prompt.
        total: number of tokens that the destination has after all parts are loaded, from the start of the
            prompt.
        prompt: length of the whole prompt in tokens.
        part: token range ``[first, last)`` that this load transfers; None for the whole prefix.
    """

    local_tokens: int
    total: int
    prompt: int
    part: tuple[int, int] | None = None

    @property
    def next_token(self) -> int:
        """Position of the first token that the destination computes.

        This is at most the position of the last prompt token. The engine always computes the last prompt
        token, to sample from, even if the KV of this token is loaded.
        """
        return min(self.total, self.prompt - 1)

    @property
    def begins(self) -> int:
        """Position of the first token that the load transfers for layers that attend to all tokens."""
        return self.local_tokens if self.part is None else max(self.local_tokens, self.part[0])

    @property
    def ends(self) -> int:
        """Position after the last token that the load transfers for layers that attend to all tokens."""
        return self.total if self.part is None else self.part[1]


Position = TypeVar("Position", int, Int64s)


def attends_to_all(kind: GroupKind) -> bool:
    """Return True if layers of this kind attend to every earlier token: full attention and MLA."""
    return kind in (GroupKind.FULL, GroupKind.MLA)


def first_attended(kind: GroupKind, attention_span: int, next_token: Position) -> Position:
    """Return the position of the first token that the token at `next_token` attends to.

    The result is 0 or negative if that token attends to all earlier tokens.

    Args:
        kind: kind of the KV cache group's layers.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        next_token: position of the attending token, or an int64 array of positions. The result has the shape
            of this argument.

    >>> first_attended(GroupKind.SLIDING, 24, 63), first_attended(GroupKind.CHUNKED, 32, 63)
    (40, 32)
    """
    if kind is GroupKind.SLIDING:
        return next_token - attention_span + 1
    if kind is GroupKind.CHUNKED:
        return next_token // attention_span * attention_span
    return next_token * 0


class BlockPattern(Protocol):
    """The attention pattern and the block size of a KV cache group. `geometry.Group` implements it."""

    @property
    def kind(self) -> GroupKind:
        """Kind of the group's layers."""

    @property
    def attention_span(self) -> int:
        """Length of the sliding window or of the attention chunk in tokens; 0 for other kinds of layers."""

    @property
    def block_tokens(self) -> int:
        """Number of tokens per block."""


def windows_survive_load(groups: Iterable[BlockPattern], tokens: int) -> bool:
    """Return True if the last prompt token can still be computed after a load of the whole prompt.

    After such a load the engine frees the blocks outside the attention window of the first output token. Only
    then does it compute the last prompt token. The window of this token begins one token earlier, so it may
    need a block that was just freed.

    Args:
        groups: the engine's KV cache groups.
        tokens: length of the prompt in tokens.
    """
    return all(
        first_attended(one.kind, one.attention_span, tokens - 1) // one.block_tokens
        == first_attended(one.kind, one.attention_span, tokens) // one.block_tokens
        for one in groups
        if one.attention_span and tokens >= one.attention_span
    )


def needed_tokens(kind: GroupKind, attention_span: int, span: LoadSpan) -> tuple[int, int]:
    """Return the tokens ``[low, high)`` that a load must transfer for a group.

    These are the tokens of the load that the next computed token attends to and that the destination does not
    have. For a state group, the load must transfer the snapshot (recurrent state at one position) after
    ``high`` tokens, unless the range is empty.

    Args:
        kind: kind of the KV cache group's layers.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        span: range of the prompt's tokens that the load covers, the same for all groups of the model.

    >>> needed_tokens(GroupKind.SLIDING, 24, LoadSpan(0, total=64, prompt=64))   # next: 63, sees 40..63
    (40, 64)
    >>> needed_tokens(GroupKind.FULL, 0, LoadSpan(local_tokens=16, total=64, prompt=64))
    (16, 64)
    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> # The load of the last part, not of the head, transfers the sliding window.
    >>> needed_tokens(GroupKind.FULL, 0, head), needed_tokens(GroupKind.SLIDING, 24, head)
    ((16, 48), (48, 48))
    """
    if attends_to_all(kind):
        low = span.begins
    elif span.ends < span.total:
        low = span.ends
    else:
        low = max(span.local_tokens, first_attended(kind, attention_span, span.next_token))
    return min(low, span.ends), span.ends


def first_independent(kind: GroupKind, attention_span: int, end: int) -> int:
    """Return the position of the first token that attends to no token before `end`.

    Args:
        kind: kind of the group's layers, sliding-window or chunked attention.
        attention_span: length of the window or attention chunk in tokens.
        end: position in the prompt, in tokens.

    >>> first_independent(GroupKind.SLIDING, 24, 64), first_independent(GroupKind.CHUNKED, 32, 48)
    (87, 64)
    """
    if kind is GroupKind.CHUNKED:
        return -(-end // attention_span) * attention_span
    return end + attention_span - 1


def partial_block(
    kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan, alignment_tokens: int
) -> int | None:
    """Return the block table position of the first loaded block if the load leaves its start unfilled.

    A group with sliding windows or attention chunks loads only the tokens from the start of the window or
    attention chunk, which may lie inside a block. Return None if no start of a block stays unfilled.

    Args:
        kind: kind of the layers of the destination's group.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        block_tokens: number of tokens per block of the destination's group.
        span: tokens that are loaded.
        alignment_tokens: alignment of loaded content in tokens. Loaded content begins at the largest multiple
            of `alignment_tokens` that is not after the first needed token.
    """
    if not attention_span:
        return None
    low, high = needed_tokens(kind, attention_span, span)
    first = low // block_tokens
    loaded_from = low // alignment_tokens * alignment_tokens
    return first if low < high and max(first * block_tokens, span.local_tokens) < loaded_from else None


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells that a request transfers for one set of layers (route), in ascending order of position.

    A cell is the part of a block that is copied as one unit.

    Attributes:
        src_block, dst_block: id of the block that holds each cell at the source and at the destination, int64
            of shape (n,).
        number: index of each cell in the sequence, int64 of shape (n,). The index determines the position of
            the cell in its block on each side.
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
    """Return the cells that a request transfers for the layers of `route`.

    A cell is the part of a block that is copied as one unit. The last cell may contain tokens after the end
    of the span. The engine does not read these tokens.

    Args:
        route: layers to transfer.
        kind: kind of the layers of the destination's group.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        span: tokens to transfer.
        src_table, dst_table: block ids by position at the source and at the destination, int64 of shape
            (blocks,).

    Raises:
        TransferError: a needed block is missing, null or not in the pool of its side; or the prefix that the
            destination already has ends inside a cell; or a part of the loaded prefix ends inside a block.
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
    src_index, dst_index = cells // route.src_cells, cells // route.dst_cells
    for table, at, side in ((src_table, src_index, "source"), (dst_table, dst_index, "destination")):
        if at[-1] >= len(table):
            raise TransferError(
                f"tokens [{low}, {high}) need block {at[-1]} of the {side}'s table, which has {len(table)}"
            )
    return _cells(route, src_table[src_index], dst_table[dst_index], cells)


def partly_written_blocks(
    route: Route, kind: GroupKind, attention_span: int, span: LoadSpan, dst_table: Int64s
) -> Int64s:
    """Return the ids of the destination blocks that a load fills only in part: none, one or two, int64.

    Only the first and the last block of the load can be partly filled. A block that also holds tokens that
    the destination already has is left out. The caller must clear the returned blocks before the load.
    Attention reads the unfilled part with weight 0, but a NaN in the old content would spread.

    Args:
        route: layers to transfer.
        kind: kind of the layers of the destination's group.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        span: tokens to transfer.
        dst_table: block ids by position at the destination, int64 of shape (blocks,).
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
    """Check that the load of one part of a prefix shares no destination block with the adjacent parts.

    Args:
        route: layers to transfer.
        kind: kind of the layers of the destination's group.
        span: tokens to transfer.

    Raises:
        TransferError: the part begins or ends inside a block, so this load would overwrite tokens of the
            adjacent part.
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
    """Check that every block id is valid, and return the cells (parts of blocks that are copied as one unit).

    With an id beyond the pool, the transfer would use memory that does not belong to the block.

    Args:
        route: layers to transfer.
        src, dst: id of the block that holds each cell at the source and at the destination, int64 of shape
            (n,).
        number: index of each cell in the sequence, int64 of shape (n,).

    Raises:
        TransferError: a block is null or not in the pool of its side.
    """
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
    """Return the ids of a group's blocks that hold the tokens to load, int64, in order of position.

    The tokens to load are those that `needed_tokens` returns.

    Args:
        kind: kind of the KV cache group's layers.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        block_tokens: number of tokens per block of the group.
        span: range of the prompt's tokens that the load covers, the same for all groups of the model.
        table: block ids of the group by position, int64; for a state group, the one block with the snapshot
            (recurrent state at one position).
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
    """Return the ids of those blocks of a group that a load fills and that hold no tokens before the load.

    These are the blocks of `blocks_needed`, except null blocks and a first block in which the engine already
    has tokens. The result is int64, in order of position.

    Args:
        kind: kind of the KV cache group's layers.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        block_tokens: number of tokens per block of the group.
        span: range of the prompt's tokens that the load covers, the same for all groups of the model.
        table: block ids of the group by position, int64; for a state group, the one block with the snapshot
            (recurrent state at one position).
    """
    ids = blocks_needed(kind, attention_span, block_tokens, span, table)
    if kind is not GroupKind.STATE:  # the block of a snapshot is written as a whole
        first = needed_tokens(kind, attention_span, span)[0] // block_tokens
        ids = ids[int(first * block_tokens < span.local_tokens) :]
    found: Int64s = ids[ids != NULL_BLOCK]
    return found


def writable_blocks(kind: GroupKind, block_tokens: int, span: LoadSpan) -> slice:
    """Return the slice of a group's block table that contains all blocks that a load may write.

    In a group with attention windows, the slice begins at the end of the tokens that the destination already
    has, although the load writes only the blocks of the last window. The slice is empty if the group does not
    attend to all tokens and another load transfers the end of the prefix.

    Args:
        kind: kind of the KV cache group's layers.
        block_tokens: number of tokens per block of the group.
        span: range of the prompt's tokens that the load covers, the same for all groups of the model.

    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> writable_blocks(GroupKind.FULL, 16, head), writable_blocks(GroupKind.SLIDING, 16, head)  # 2nd: empty
    (slice(1, 3, None), slice(1, 0, None))
    >>> tail = LoadSpan(local_tokens=16, total=64, prompt=64, part=(48, 64))
    >>> writable_blocks(GroupKind.STATE, 16, head), writable_blocks(GroupKind.STATE, 16, tail)
    (slice(0, 0, None), slice(0, None, None))
    """
    last = span.ends == span.total
    if attends_to_all(kind):
        return slice(span.begins // block_tokens, None if last else -(-span.ends // block_tokens))
    if kind is GroupKind.STATE:
        return slice(0, None if last else 0)
    return slice(span.local_tokens // block_tokens, None if last else 0)


def max_writable_blocks(kind: GroupKind, attention_span: int, block_tokens: int, span: LoadSpan) -> int:
    """Return the maximum number of blocks of a group that a load may write, null blocks excluded.

    Args:
        kind: kind of the KV cache group's layers.
        attention_span: length of the sliding window or attention chunk in tokens; 0 for other kinds.
        block_tokens: number of tokens per block of the group.
        span: range of the prompt's tokens that the load covers, the same for all groups of the model.

    >>> span = LoadSpan(local_tokens=16, total=64, prompt=65)  # the window of token 64 begins at token 45
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
