"""Selection of the tokens of a KV cache group that a request needs, and of their blocks and cells.

A block table is an int64 array of block ids: entry ``i`` holds the tokens ``[i·block, (i+1)·block)``, with
context parallelism on all ranks together. The table of a state group has one entry, the block with the
snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Protocol, TypeVar

import numpy as np

from kvferry.common.errors import TransferError
from kvferry.geometry import Attention, GroupKind, GroupPattern, RankGeometry
from kvferry.planning.descriptors import Int64s
from kvferry.planning.template import Route

# Id of the null block, which holds no tokens.
NULL_BLOCK = 0

# A load may write two blocks in a state group: the loaded snapshot and the running state.
STATE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """The tokens of a prompt that a load transfers.

    Several sources may each load a part of a prefix. For layers that attend to all tokens, each part
    transfers its own tokens. Other layers need only the end of the prefix, which the last part transfers.
    """

    local_tokens: int  # that the destination has before the load
    total: int  # that it has after all parts of the load
    prompt: int  # length of the whole prompt
    part: tuple[int, int] | None = None  # token range ``[first, last)``; None for the whole prefix

    @property
    def next_token(self) -> int:
        """Position of the first token that the destination computes."""
        # The engine always computes the last prompt token, to sample from, even if its KV is loaded.
        return min(self.total, self.prompt - 1)

    @property
    def begins(self) -> int:
        """Position of the first token to transfer for layers that attend to all tokens."""
        return self.local_tokens if self.part is None else max(self.local_tokens, self.part[0])

    @property
    def ends(self) -> int:
        return self.total if self.part is None else self.part[1]


Position = TypeVar("Position", int, Int64s)

# The pattern of a load that transfers exactly the tokens of its span.
ALL_TOKENS = Attention(GroupKind.FULL)


def attends_to_all(kind: GroupKind) -> bool:
    """Return True for full attention and MLA."""
    return kind in (GroupKind.FULL, GroupKind.MLA)


def first_attended(group: GroupPattern, next_token: Position) -> Position:
    """Return the position of the first token that the token at `next_token` attends to.

    The result is 0 or negative if that token attends to all earlier tokens.

    >>> window, chunked = Attention(GroupKind.SLIDING, 24), Attention(GroupKind.CHUNKED, 32)
    >>> first_attended(window, 63), first_attended(chunked, 63)
    (40, 32)
    """
    if group.kind is GroupKind.SLIDING:
        return next_token - group.attention_span + 1
    if group.kind is GroupKind.CHUNKED:
        return next_token // group.attention_span * group.attention_span
    return next_token * 0


def first_needed_token(group: GroupPattern, low: int, high: int, alignment: int) -> int:
    """Return the first of the tokens ``[low, high)`` of a chunk that a prefix needs that ends with it.

    A chunk can be stored without the tokens before. `alignment` is that of its content
    (`geometry.canonical.derive.content_alignment`).
    """
    return max(low, first_attended(group, high - 1) // alignment * alignment)


class BlockPattern(GroupPattern, Protocol):
    """The attention pattern and the block size of a KV cache group."""

    @property
    def block_tokens(self) -> int: ...


def windows_survive_load(groups: Iterable[BlockPattern], tokens: int) -> bool:
    """Return True if the last token of a prompt can still be computed after a load of the whole prompt."""
    # After the load the engine frees the blocks outside the window of the first output token. Only then does
    # it compute the last prompt token, whose window begins one token earlier, maybe in a freed block.
    for group in groups:
        if group.attention_span and tokens >= group.attention_span:
            last, after = first_attended(group, tokens - 1), first_attended(group, tokens)
            if last // group.block_tokens != after // group.block_tokens:
                return False
    return True


def needed_tokens(group: GroupPattern, span: LoadSpan) -> tuple[int, int]:
    """Return the tokens ``[low, high)`` that a load must transfer for a group.

    The next computed token attends to them, and the destination does not have them. For a state group, the
    load must transfer the snapshot after ``high`` tokens, unless the range is empty.

    >>> window, full = Attention(GroupKind.SLIDING, 24), Attention(GroupKind.FULL)
    >>> needed_tokens(window, LoadSpan(0, total=64, prompt=64))   # next: 63, sees 40..63
    (40, 64)
    >>> needed_tokens(full, LoadSpan(local_tokens=16, total=64, prompt=64))
    (16, 64)
    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> # The load of the last part, not of the head, transfers the sliding window.
    >>> needed_tokens(full, head), needed_tokens(window, head)
    ((16, 48), (48, 48))
    """
    if attends_to_all(group.kind):
        low = span.begins
    elif span.ends < span.total:
        low = span.ends
    else:
        low = max(span.local_tokens, first_attended(group, span.next_token))
    return min(low, span.ends), span.ends


def first_independent(group: GroupPattern, end: int) -> int:
    """Return the first token that attends to no token before `end`, in a group with an attention span.

    >>> window, chunked = Attention(GroupKind.SLIDING, 24), Attention(GroupKind.CHUNKED, 32)
    >>> first_independent(window, 64), first_independent(chunked, 48)
    (87, 64)
    """
    if group.kind is GroupKind.CHUNKED:
        return -(-end // group.attention_span) * group.attention_span
    return end + group.attention_span - 1


def partial_block(group: BlockPattern, span: LoadSpan, alignment_tokens: int) -> int | None:
    """Return the position in the block table of a block whose start the load leaves unfilled; None for none.

    Loaded content begins at a multiple of `alignment_tokens`, at or before the first needed token.
    """
    if not group.attention_span:
        return None
    low, high = needed_tokens(group, span)
    first = low // group.block_tokens
    begins = max(first * group.block_tokens, span.local_tokens)
    return first if low < high and begins < low // alignment_tokens * alignment_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells that a request transfers for one route, in ascending order of position: int64 of shape (n,).

    The numbers are the index of each cell among those that the side's rank holds of the sequence. Its place
    in a block follows from it.
    """

    src_block: Int64s
    dst_block: Int64s
    src_number: Int64s
    dst_number: Int64s

    def __len__(self) -> int:
        return len(self.src_block)

    def __getitem__(self, part: slice) -> Cells:
        return Cells(self.src_block[part], self.dst_block[part], self.src_number[part], self.dst_number[part])


NO_CELLS = Cells(*[np.zeros(0, np.int64)] * 4)


def select_cells(
    route: Route, group: GroupPattern, span: LoadSpan, src_table: Int64s, dst_table: Int64s
) -> Cells:
    """Return the cells that a request transfers for the layers of `route`, in the destination's `group`.

    Raise TransferError if a needed block is missing, null or not in its pool, the prefix that the destination
    has ends inside a cell, or a part of the loaded prefix ends inside a block.
    """
    first, last = needed_cells(route, group.kind, span, needed_tokens(group, span))
    return take_cells(route, first, last, src_table, dst_table)


def needed_cells(route: Route, kind: GroupKind, span: LoadSpan, needed: tuple[int, int]) -> tuple[int, int]:
    """Return the range ``[first, last)`` of the cells that hold the `needed_tokens` of a group.

    Raise TransferError if the prefix that the destination has ends inside a cell, or a part of the loaded
    prefix ends inside a block.
    """
    low, high = needed
    if low >= high:
        return 0, 0
    size = route.cell_tokens
    if not size:
        return 0, 1
    first = low // size
    if first * size < span.local_tokens:
        raise TransferError(
            f"the local prefix ends at token {span.local_tokens}, inside the cell of "
            f"{size} tokens from {first * size}; it must end on one"
        )
    check_part_edges(route, kind, span)
    # The last cell may hold tokens after the end of the span. The engine does not read them.
    return first, -(-high // size)


def take_cells(route: Route, first: int, last: int, src_table: Int64s, dst_table: Int64s) -> Cells:
    """Return those of the cells ``[first, last)`` that both sides of a route hold, with their blocks.

    Raise TransferError if one of their blocks is missing, null or not in its pool.
    """
    if first >= last:
        return NO_CELLS
    if not route.cell_tokens and (len(src_table) != 1 or len(dst_table) != 1):
        raise TransferError(
            f"a state group moves one block, the tables name {len(src_table)} and {len(dst_table)}"
        )
    src_held = dst_held = number = np.arange(first, last, dtype=np.int64)
    if divided := route.interleaves:
        for interleave in divided:
            number = number[interleave.holds(number)]
        if not len(number):
            return NO_CELLS
        src_held, dst_held = route.src_interleave.index_of(number), route.dst_interleave.index_of(number)
    blocks = []
    for table, held, cells, pool, side in (
        (src_table, src_held, route.src_cells, route.src_blocks, "source"),
        (dst_table, dst_held, route.dst_cells, route.dst_blocks, "destination"),
    ):
        if (at := held.item(-1) // cells) >= len(table):
            raise TransferError(
                f"tokens [{first * route.cell_tokens}, {last * route.cell_tokens}) need block {at} of the "
                f"{side}'s table, which has {len(table)}"
            )
        ids = table[first:last] if cells == 1 and not divided else table[held // cells]
        _check_blocks(ids, pool, side)
        blocks.append(ids)
    return Cells(blocks[0], blocks[1], src_held, dst_held)


def _check_blocks(ids: Int64s, pool: int, side: str) -> None:
    # `argmin` takes a fifth of the time of `min` for a few ids.
    least, most = int(ids[ids.argmin()]), int(ids[ids.argmax()])
    if least > NULL_BLOCK and most < pool:
        return
    if least == NULL_BLOCK:
        raise TransferError(f"the {side} no longer holds a block that the request needs (null block)")
    # With an id beyond the pool, the transfer would use memory that belongs to something else.
    raise TransferError(f"the {side}'s table names blocks {least} to {most}, its pool has {pool}")


def unfilled_cells(
    route: Route, group: GroupPattern, span: LoadSpan, dst_table: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the cells that the caller must clear for a load, as (block ids, `Cells.dst_number`), int64.

    They are in blocks that the load fills only in part. Attention reads them with weight 0, but a NaN in the
    old content would spread. A block that also holds tokens that the destination already has is left out.
    """
    found, per_block = list[int](), route.dst_block_cells
    low, high = needed_tokens(group, span)
    if per_block > 1 and low < high:
        first, last = low // route.cell_tokens, -(-high // route.cell_tokens)
        # The rest of the first and of the last block: so few cells that numpy would take longer.
        head, tail = (
            range(first // per_block * per_block, first),
            range(last, -(-last // per_block) * per_block),
        )
        for rest in (head, tail):
            if rest.start // per_block * per_block * route.cell_tokens >= span.local_tokens:
                found += rest
    if not found:
        return dst_table[:0], dst_table[:0]
    number = np.array(found, np.int64)
    for interleave in route.interleaves:
        number = number[interleave.holds(number)]
    held = route.dst_interleave.index_of(number)
    return dst_table[held // route.dst_cells], held


def check_part_edges(route: Route, kind: GroupKind, span: LoadSpan) -> None:
    """Raise TransferError if a part of a prefix shares a destination block with an adjacent part."""
    if span.part is None or not attends_to_all(kind):
        return
    block = route.cell_tokens * route.dst_block_cells
    for at in ({span.begins} - {span.local_tokens}) | ({span.ends} - {span.total}):
        # Both parts would write the block, so one would overwrite tokens of the other.
        if at % block:
            raise TransferError(
                f"a part of a prefix begins or ends at token {at}, inside a block; "
                f"expected a multiple of {block}"
            )


def blocks_needed(group: BlockPattern, span: LoadSpan, table: Int64s) -> Int64s:
    """Return the ids of the blocks that hold the tokens of `needed_tokens`, in order of position."""
    low, high = needed_tokens(group, span)
    if low >= high:
        return table[:0]
    if group.kind is GroupKind.STATE:
        return table
    return table[low // group.block_tokens : -(-high // group.block_tokens)]


def count_blocks_needed(group: BlockPattern, span: LoadSpan) -> int:
    """Return the number of `blocks_needed`.

    >>> from kvferry.geometry import Group
    >>> count_blocks_needed(Group(GroupKind.FULL, 16, 0, ()), LoadSpan(local_tokens=16, total=40, prompt=41))
    2
    """
    low, high = needed_tokens(group, span)
    if low >= high:
        return 0
    if group.kind is GroupKind.STATE:
        return 1
    return -(-high // group.block_tokens) - low // group.block_tokens


def unwritten_blocks_needed(group: BlockPattern, span: LoadSpan, table: Int64s) -> Int64s:
    """Return those `blocks_needed`, without null blocks, that hold no tokens before the load."""
    ids = blocks_needed(group, span, table)
    if group.kind is not GroupKind.STATE:  # the block of a snapshot is written as a whole
        first = needed_tokens(group, span)[0] // group.block_tokens
        ids = ids[int(first * group.block_tokens < span.local_tokens) :]
    found: Int64s = ids[ids != NULL_BLOCK]
    return found


def writable_blocks(group: BlockPattern, span: LoadSpan) -> slice:
    """Return the slice of a group's block table that contains all blocks that a load may write.

    >>> from kvferry.geometry import Group
    >>> full, window = Group(GroupKind.FULL, 16, 0, ()), Group(GroupKind.SLIDING, 16, 20, ())
    >>> state = Group(GroupKind.STATE, 16, 0, ())
    >>> head = LoadSpan(local_tokens=16, total=64, prompt=64, part=(16, 48))
    >>> writable_blocks(full, head), writable_blocks(window, head)  # 2nd: empty
    (slice(1, 3, None), slice(1, 0, None))
    >>> tail = LoadSpan(local_tokens=16, total=64, prompt=64, part=(48, 64))
    >>> writable_blocks(state, head), writable_blocks(state, tail)
    (slice(0, 0, None), slice(0, None, None))
    """
    last, size = span.ends == span.total, group.block_tokens
    if attends_to_all(group.kind):
        return slice(span.begins // size, None if last else -(-span.ends // size))
    if group.kind is GroupKind.STATE:
        return slice(0, None if last else 0)
    # The load writes only the last window. The engine has null blocks before it, which cost nothing to pin.
    return slice(span.local_tokens // size, None if last else 0)


def max_writable_blocks(group: BlockPattern, span: LoadSpan) -> int:
    """Return the largest number of blocks of a group that a load may write.

    >>> from kvferry.geometry import Group
    >>> full, window = Group(GroupKind.FULL, 16, 0, ()), Group(GroupKind.SLIDING, 16, 20, ())
    >>> span = LoadSpan(local_tokens=16, total=64, prompt=65)  # the window of token 64 begins at token 45
    >>> max_writable_blocks(full, span), max_writable_blocks(window, span)
    (3, 2)
    """
    if attends_to_all(group.kind):
        first = span.begins
    elif span.ends != span.total:
        return 0
    elif group.kind is GroupKind.STATE:
        return STATE_BLOCKS
    else:
        first = max(span.local_tokens, first_attended(group, span.total))
    return -(-span.ends // group.block_tokens) - first // group.block_tokens


def next_part(
    span: LoadSpan, done: int, ready: int, *, alignment_tokens: int, whole: bool
) -> LoadSpan | None:
    """Return the next part of a load that can be read now; None if there is nothing to read yet.

    Args:
        done: position up to which earlier parts have been read; at first `span.begins`.
        ready: number of tokens whose KV the source has; `whole` if these are all that it offers.
        alignment_tokens: two parts may meet at multiples of this; 0 if no group attends to all tokens.

    >>> span = LoadSpan(local_tokens=16, total=100, prompt=101)
    >>> next_part(span, 16, 70, alignment_tokens=16, whole=False).part
    (16, 64)
    >>> next_part(span, 64, 100, alignment_tokens=16, whole=True).part
    (64, 100)
    >>> next_part(span, 16, 100, alignment_tokens=16, whole=True) == span
    True
    """
    if whole:
        end = span.ends
    elif not alignment_tokens:
        return None
    else:
        # The last part of a prefix also transfers windows and state, so it waits for the source's last token.
        most = span.ends - 1 if span.ends == span.total else span.ends
        end = min(ready, most) // alignment_tokens * alignment_tokens
    if end <= done:
        return None
    return span if (done, end) == (span.begins, span.ends) else replace(span, part=(done, end))


def block_alignments(
    srcs: Sequence[RankGeometry], dsts: Sequence[RankGeometry]
) -> tuple[tuple[int, ...], bool]:
    """Return (greatest common divisor of both sides' block sizes, for each group of this engine; in_parts).

    `in_parts` is False if the peer computes the final content of some layers, which attend to all tokens
    here, only with a prompt's last token.
    """
    theirs = _groups(srcs)
    alignments, in_parts = [], True
    for block_tokens, attends, layers in _groups(dsts):
        shared = [(tokens, all_there) for tokens, all_there, names in theirs if names & layers]
        alignments.append(gcd(block_tokens, *(tokens for tokens, _ in shared)))
        in_parts &= not attends or all(all_there for _, all_there in shared)
    return tuple(alignments), in_parts


def _groups(ranks: Sequence[RankGeometry]) -> list[tuple[int, bool, set[str]]]:
    """Return (tokens per block, whether it attends to all tokens, layers on all ranks) of each group."""
    # Groups of two engines are matched by the layers that they share, not by their index. Engines may group
    # the same layers differently: one may treat a sliding-window layer as full attention, for example.
    found: list[tuple[int, bool, set[str]]] = []
    for rank in ranks:
        for number, group in enumerate(rank.groups):
            if number == len(found):
                found.append((group.block_tokens, attends_to_all(group.kind), set()))
            found[number][2].update(layer.identity for layer in group.layers)
    return found
