"""The inner structure of one rank's page: its heads, tokens and fields.

A page is a three-dimensional box of (heads, tokens, content bytes). In a page of tokens, the content of a
head and token holds all fields side by side. A snapshot (recurrent state at one position) has no tokens. It
holds its fields one after the other, each ``[heads][inner axes]``, so its box is (1, 1, bytes). The offset of
a field is a multiple of its element size (at most 16), so that fields can be viewed as tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kvferry.errors import GeometryError
from kvferry.geometry.page import TOKEN, Axis, Field, PageFormat
from kvferry.geometry.pagemap import PageMap
from kvferry.geometry.rank import GroupKind
from kvferry.geometry.store import LayerCache, StoredField

HEAD = "head"
STATE = "state"
"""Name of the axis of stored entries, in pages where one entry stands for several tokens."""


def shard_heads(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (index of the first head, number of heads) that a tensor-parallel rank holds.

    If there are fewer heads than ranks, neighbouring ranks hold copies of the same head.

    >>> [shard_heads(8, rank, 4) for rank in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 2)]
    >>> [shard_heads(2, rank, 4) for rank in range(4)]
    [(0, 1), (0, 1), (1, 1), (1, 1)]

    Args:
        heads: number of heads over all ranks.
        rank: tensor-parallel rank.
        ranks: number of tensor-parallel ranks.

    Raises:
        GeometryError: neither the number of heads nor the number of ranks divides the other.
    """
    if heads % ranks == 0:
        return rank * (heads // ranks), heads // ranks
    if ranks % heads == 0:
        return rank // (ranks // heads), 1
    raise GeometryError(
        f"{heads} heads on {ranks} tensor-parallel ranks: choose a size that divides {heads}, "
        "or a multiple of it"
    )


@dataclass(frozen=True, slots=True)
class PlacedField:
    """A field and its position inside a page (memory of one block in one layer).

    Attributes:
        stored: name, element size and axes of the field, over all ranks.
        start, count: index of the first head, and number of heads on this rank; (0, 1) for a field that every
            rank holds whole.
        offset: byte offset of the field. For a snapshot (recurrent state at one position), it is relative to
            the start of the page, otherwise to the start of one head's bytes for one token or stored entry.
    """

    stored: StoredField
    start: int
    count: int
    offset: int

    def field(self, head_stride: int, tokens: tuple[tuple[int, int], ...]) -> Field:
        """Return the byte offset, axes and strides of this field in a page.

        Args:
            head_stride: bytes from one head to the next.
            tokens: (count, stride in bytes) of each of the nested loops over the tokens, outermost first;
                empty if the page is a snapshot (recurrent state at one position).
        """
        axes = [Axis(TOKEN, tokens)] if tokens else []
        if self.stored.heads:
            axes.insert(0, Axis(HEAD, ((self.count, head_stride),), self.start, self.stored.heads))
        stride = self.stored.item_bytes
        inner: list[Axis] = []
        for name, count in reversed(self.stored.inner):
            inner.insert(0, Axis(name, ((count, stride),)))
            stride *= count
        return Field(self.stored.name, self.stored.item_bytes, self.offset, (*axes, *inner))

    def entries(self, count: int, stride: int) -> Field:
        """Return the axes and strides of this field in a page where each entry stands for several tokens.

        Args:
            count: number of entries in the page.
            stride: bytes from one entry to the next.
        """
        inner: list[Axis] = []
        step = self.stored.item_bytes
        for name, size in reversed(self.stored.inner):
            inner.insert(0, Axis(name, ((size, step),)))
            step *= size
        axes = (Axis(STATE, ((count, stride),)), *inner)
        return Field(self.stored.name, self.stored.item_bytes, self.offset, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInterior:
    """The inner structure of one rank's page (memory of one block in one layer).

    Attributes:
        snapshot: True if the page holds a snapshot (recurrent state at one position) instead of tokens.
        state_tokens: number of tokens that share one stored entry; 1 if every token has its own entry.
        kernels: number of kernel blocks (blocks as the attention kernel addresses them) in the page; 1 for a
            snapshot.
        heads: number of heads on this rank; 1 for a snapshot.
        tokens: number of stored entries in a kernel block, which is the number of tokens if `state_tokens` is
            1; 1 for a snapshot.
        content: bytes of all fields of one head in one entry; for a snapshot, bytes of the whole page.
        alignment: alignment of the page's address in bytes.
        placed_fields: fields of the page, with their positions.
    """

    snapshot: bool
    state_tokens: int
    kernels: int
    heads: int
    tokens: int
    content: int
    alignment: int
    placed_fields: tuple[PlacedField, ...]

    @property
    def page_bytes(self) -> int:
        """Size of the page in bytes."""
        return self.kernels * self.heads * self.tokens * self.content

    def page(self, where: PageMap) -> PageFormat:
        """Return the format of one page: its size, and its fields with byte offsets and strides.

        Args:
            where: addresses and strides of the pages of the KV cache group. Only the strides between kernel
                blocks (blocks as the attention kernel addresses them), heads and tokens are used.
        """
        _, kernel, head, token, _ = where.strides
        if self.snapshot:
            fields = tuple(part.field(part.stored.head_bytes, ()) for part in self.placed_fields)
            return PageFormat("state", 0, self.content, fields)
        if self.state_tokens > 1:
            whole = tuple(part.entries(self.tokens, token) for part in self.placed_fields)
            return PageFormat("compressed", self.tokens * self.state_tokens, self.page_bytes, whole)
        split = ((self.kernels, kernel),) if self.kernels > 1 else ()
        fields = tuple(part.field(head, (*split, (self.tokens, token))) for part in self.placed_fields)
        reach = max(field.extent()[1] for field in fields)
        return PageFormat("packed", self.kernels * self.tokens, reach, fields)


def page_interior(store: LayerCache, tokens: int, kernels: int, tp_rank: int, tp: int) -> PageInterior:
    """Return the inner structure of one rank's page (memory of one block in one layer).

    Args:
        store: description of the layer's cache, over all ranks.
        tokens: number of tokens per kernel block (block as the attention kernel addresses it); ignored for
            recurrent state.
        kernels: number of kernel blocks per page; ignored for recurrent state.
        tp_rank: tensor-parallel rank.
        tp: number of tensor-parallel ranks.

    Raises:
        GeometryError: the heads cannot be distributed evenly over the ranks, the fields of a page of tokens
            have different numbers of heads, or a cache whose entries stand for several tokens is sharded by
            head.
    """
    held = [shard_heads(stored.heads, tp_rank, tp) if stored.heads else (0, 1) for stored in store.fields]
    snapshot = store.kind is GroupKind.STATE
    if not snapshot and len({stored.heads for stored in store.fields}) > 1:
        listed = ", ".join(f"{stored.name} {stored.heads}" for stored in store.fields)
        raise GeometryError(
            f"a page of {store.kind} packs its fields per head, so all need the same number of heads, "
            f"but they have {listed}; describe fields with other heads as a separate layer"
        )
    placed_fields = []
    at = 0
    for stored, (start, count) in zip(store.fields, held, strict=True):
        at = round_up(at, _alignment(stored))
        placed_fields.append(PlacedField(stored, start, count, at))
        at += stored.head_bytes * (count if snapshot else 1)
    alignment = max(_alignment(stored) for stored in store.fields)
    heads = 1 if snapshot else held[0][1]
    if snapshot:
        kernels = tokens = 1
    if store.state_tokens > 1:
        if any(stored.heads for stored in store.fields):
            raise GeometryError(
                f"a field with one entry per {store.state_tokens} tokens cannot be sharded by head; "
                "give its fields no heads"
            )
        tokens = max(tokens // store.state_tokens, 1)
    return PageInterior(
        snapshot=snapshot,
        state_tokens=store.state_tokens,
        kernels=kernels,
        heads=heads,
        tokens=tokens,
        content=round_up(at, alignment),
        alignment=alignment,
        placed_fields=tuple(placed_fields),
    )


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def _alignment(stored: StoredField) -> int:
    """Return a field's alignment: the largest power of two up to 16 that divides its bytes per element."""
    return gcd(stored.item_bytes, 16)
