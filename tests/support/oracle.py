"""The brute-force mover: what a transfer must do to memory, computed without the planner.

Every element of the model's whole cache has logical coordinates: layer, field, position in the sequence,
index along each axis. Its bytes are a hash of those, so a value in the wrong place is a wrong value. Sources
are filled element by element from coordinates; what a destination must hold afterwards is computed the same
way. Addresses are fake: a `Memory` maps them to its array.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from kvferry.geometry import Field, Group, GroupKind, Layer, RankGeometry
from kvferry.planning.descriptors import Descriptors, concatenate
from kvferry.planning.select import Cells, LoadSpan
from kvferry.planning.template import Route

Table = np.ndarray
"""Block ids by position, int64; for a state group the one block of the snapshot."""


@dataclass
class Memory:
    """One rank's registered bytes, at an address that nothing is at."""

    address: int
    bytes: np.ndarray

    @classmethod
    def of(cls, rank: RankGeometry, seed: int) -> Memory:
        """Noise: bytes that no planner is meant to read or to change."""
        (region,) = rank.regions
        noise = np.random.default_rng(seed).integers(0, 256, region.length, np.uint8)
        return cls(region.address, noise)

    def at(self, address: int, length: int) -> slice:
        """Where a stretch of addresses is in `bytes`; AssertionError if it leaves them."""
        start = address - self.address
        assert start >= 0, f"reaches {-start} bytes before the region"
        assert start + length <= len(self.bytes), (
            f"reaches {start + length - len(self.bytes)} bytes past the region"
        )
        return slice(start, start + length)


def fill(rank: RankGeometry, tables: Sequence[Table], memory: Memory) -> None:
    """Write the whole sequence into one source rank: every element, where its geometry says."""
    for group, table in zip(rank.groups, tables, strict=True):
        positions = np.flatnonzero(table)
        for layer in group.layers:
            for field in layer.page.fields:
                where, value, _ = _elements(layer, field, positions, table[positions])
                memory.bytes[where - memory.address] = value


@dataclass
class Expected:
    """What a destination rank's memory may hold after a transfer.

    Attributes:
        before: its bytes before.
        value: its bytes if every cell that overlaps a needed one is moved whole.
        must: True where `value` is needed; elsewhere `before` is as good.
        zero: True where zeros are as good as `value`.
    """

    before: np.ndarray
    value: np.ndarray
    must: np.ndarray
    zero: np.ndarray

    def check(self, found: np.ndarray) -> None:
        """Raise AssertionError unless `found` is allowed."""
        right = (found == self.value) | ((found == self.before) & ~self.must) | ((found == 0) & self.zero)
        wrong = np.flatnonzero(~right)
        if len(wrong):
            missed = int((self.must[wrong] & (found[wrong] == self.before[wrong])).sum())
            raise AssertionError(
                f"{len(wrong)} of {len(found)} bytes are wrong, the first at {wrong[0]}; "
                f"{missed} of them were needed and never written"
            )


def expect(
    dst: RankGeometry,
    srcs: Sequence[RankGeometry],
    spans: Sequence[LoadSpan],
    tables: Sequence[Table],
    before: np.ndarray,
    *,
    cleared: bool = False,
) -> Expected:
    """What `dst` must hold; spans and tables by group of the destination.

    `cleared`: blocks that are moved in part, and held nothing, hold zeros in the rest.
    """
    (region,) = dst.regions
    value, must, zero = before.copy(), np.zeros(len(before), bool), np.zeros(len(before), bool)
    block_tokens = {
        layer.name: layer.page.block_tokens for src in srcs for g in src.groups for layer in g.layers
    }
    for group, span, table in zip(dst.groups, spans, tables, strict=True):
        needs = visible(group.kind, group.attention_span, span)
        for layer in group.layers:
            for field in layer.page.fields:
                blocks = np.flatnonzero(table)
                where, bytes_, first = _elements(layer, field, blocks, table[blocks])
                wanted, moved = _moved(group, layer, field, needs, first, block_tokens[layer.name])
                index = (where - region.address)[moved]
                value[index] = bytes_[moved]
                must[(where - region.address)[wanted]] = True
                if cleared and field.axis("token") and layer.page.block_tokens:
                    left = _left_over(layer, needs, span.local_tokens, first, block_tokens[layer.name])
                    value[(where - region.address)[left]] = 0
                    must[(where - region.address)[left]] = True
                    # Where ranks take turns, cells are smaller, and what they leave is cleared too.
                    zero[(where - region.address)[moved & ~wanted]] = True
    return Expected(before, value, must, zero)


def visible(kind: GroupKind, attention_span: int, span: LoadSpan) -> set[int]:
    """Tokens that the next computed token attends to, that the source has and the destination has not.

    The next computed token is the first that is not loaded, but the last prompt token is always computed.
    """
    next_token = span.total if span.total < span.prompt else span.prompt - 1
    missing = range(span.local_tokens, span.total)
    if kind is GroupKind.SLIDING:
        return {t for t in missing if t > next_token - attention_span}
    if kind is GroupKind.CHUNKED:
        return {t for t in missing if t // attention_span >= next_token // attention_span}
    return set(missing)


def cells_of(needs: set[int], src_tokens: int, dst_tokens: int) -> set[int]:
    """Every token of the cells that hold a needed one; blocks of both sides are made of whole cells."""
    cell = gcd(src_tokens, dst_tokens)
    return {t // cell * cell + i for t in needs for i in range(cell)}


def _moved(
    group: Group, layer: Layer, field: Field, needs: set[int], first: np.ndarray, src_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Masks over elements: which are needed, which may be moved. `first` is the first token of each."""
    if group.kind is GroupKind.STATE:
        return np.full(len(first), bool(needs)), np.full(len(first), bool(needs))
    whole = cells_of(needs, src_tokens, layer.page.block_tokens)
    if field.axis("token") is None:
        needed_blocks = {t // layer.page.block_tokens * layer.page.block_tokens for t in needs}
        wanted = np.isin(first, sorted(needed_blocks))
        return wanted, wanted
    return np.isin(first, sorted(needs)), np.isin(first, sorted(whole))


def _left_over(
    layer: Layer, needs: set[int], local_tokens: int, first: np.ndarray, src_tokens: int
) -> np.ndarray:
    """Mask over elements: in a block of which something is moved, but not this, and that held nothing."""
    size = layer.page.block_tokens
    whole = cells_of(needs, src_tokens, size)
    touched = {t // size for t in whole if t // size * size >= local_tokens}
    return np.isin(first // size, sorted(touched)) & ~np.isin(first, sorted(whole))


def _elements(
    layer: Layer, field: Field, positions: np.ndarray, blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every element a rank holds of a field in some blocks.

    Args:
        positions: of the blocks in the sequence, int64 of shape (b,).
        blocks: their ids.

    Returns:
        Addresses and bytes, of shape (b · elements, item_bytes), and the first token of each element's place
        in the sequence, of shape (b · elements,).
    """
    counts = [axis.count for axis in field.axes]
    index = np.indices(counts, np.int64).reshape(len(counts), -1)
    offset = np.full(index.shape[1], layer.address + field.offset, np.int64)
    coordinates = {}
    token = np.zeros(index.shape[1], np.int64)
    interleave = layer.page.interleave
    turn = [
        t
        for t in range(layer.page.block_tokens)
        if t // interleave.size % interleave.ranks == interleave.rank
    ]
    for axis, i in zip(field.axes, index, strict=True):
        if axis.name == "token":
            token = np.array(turn, np.int64)[i]
        else:
            coordinates[axis.name] = i + axis.start
        rest = i
        for count, stride in reversed(axis.loops):
            offset += rest % count * stride
            rest = rest // count
    sequence = (positions[:, None] * max(layer.page.block_tokens, 1) + token).reshape(-1)
    where = (blocks[:, None] * layer.block_stride + offset).reshape(-1)
    value = _hash(np.zeros(len(sequence), np.uint64), zlib.crc32(f"{layer.name} {field.name}".encode()))
    value = _hash(value, sequence)
    for name in sorted(coordinates):
        value = _hash(value, np.tile(coordinates[name], len(blocks)))
    inside = np.arange(field.item_bytes)
    return (
        where[:, None] + inside,
        (_hash(value[:, None], inside) >> np.uint64(40)).astype(np.uint8),
        sequence,
    )


def _hash(state: np.ndarray, value: np.ndarray | int) -> np.ndarray:
    """Mix a coordinate in: splitmix64's finalizer, uint64 modulo 2**64."""
    mixed = state * np.uint64(0x9E3779B97F4A7C15) + np.asarray(value).astype(np.uint64) + np.uint64(1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def copy(pieces: Descriptors, src: Memory, dst: Memory, writes: np.ndarray) -> None:
    """Move pieces one by one; `writes` counts per destination byte how often it was written."""
    for a, b, n in zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True):
        to = dst.at(b, n)
        dst.bytes[to] = src.bytes[src.at(a, n)]
        writes[to] += 1


def expand_cells(route: Route, cells: Cells) -> Descriptors:
    """Return the descriptors of a request as absolute addresses and lengths, row-major."""
    found = []
    for cell_copy in route.cell_copies:
        src_at, dst_at = np.array(cell_copy.src_offsets), np.array(cell_copy.dst_offsets)
        src = cells.src_block * route.src_stride + src_at[cells.src_number % route.src_cells]
        dst = cells.dst_block * route.dst_stride + dst_at[cells.dst_number % route.dst_cells]
        rows = cell_copy.descriptors
        length = np.repeat(rows.length, len(cells))
        found.append(
            Descriptors((rows.src[:, None] + src).ravel(), (rows.dst[:, None] + dst).ravel(), length)
        )
    return concatenate(found)
