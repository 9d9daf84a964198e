"""The inside of one rank's page: its heads, and the field of every byte.

A page is a box of (heads, tokens, content bytes). A token page packs all fields of a head and token side by
side in its content; a snapshot has no tokens and keeps its fields one after the other, each
``[heads][inner]``, so its box is (1, 1, bytes). Fields are aligned to their elements, so they can be viewed
as tensors.
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
"""Name of the axis of stored entries, in a page with one entry per several tokens."""


def shard_heads(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first head and the number of heads of a tensor-parallel rank.

    With fewer heads than ranks, neighbouring ranks hold copies of one head.

    >>> [shard_heads(8, rank, 4) for rank in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 2)]
    >>> [shard_heads(2, rank, 4) for rank in range(4)]
    [(0, 1), (0, 1), (1, 1), (1, 1)]

    Raises:
        GeometryError: neither number divides the other.
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
    """One field inside a page.

    Attributes:
        stored: the field over all ranks.
        start, count: first head and number of heads on this rank; (0, 1) for a field that every rank has
            whole.
        offset: first byte, inside the content of a head and token, or inside the snapshot.
    """

    stored: StoredField
    start: int
    count: int
    offset: int

    def field(self, head_stride: int, tokens: tuple[tuple[int, int], ...]) -> Field:
        """Describe the field in a page.

        Args:
            head_stride: bytes from one head to the next.
            tokens: loops of the token axis, empty in a snapshot.
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
        """Describe the field in a page with one entry per several tokens."""
        inner: list[Axis] = []
        step = self.stored.item_bytes
        for name, size in reversed(self.stored.inner):
            inner.insert(0, Axis(name, ((size, step),)))
            step *= size
        axes = (Axis(STATE, ((count, stride),)), *inner)
        return Field(self.stored.name, self.stored.item_bytes, self.offset, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInterior:
    """The inside of one rank's page.

    Attributes:
        snapshot: the page belongs to a state group.
        state_tokens: tokens per entry; 1 if every token has its own entry.
        kernels: kernel blocks of a page, each a box; 1 for a snapshot.
        heads, tokens, content: size of a box, with content in bytes; (1, 1, bytes) for a snapshot. If entries
            stand for several tokens, `tokens` counts entries.
        alignment: number of bytes that must divide its address.
        parts: fields of the page.
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
        """Bytes of the page."""
        return self.kernels * self.heads * self.tokens * self.content

    def page(self, where: PageMap) -> PageFormat:
        """Describe a page whose heads and tokens lie as `where` maps them."""
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
    """Compute the inside of one rank's page of a layer.

    Args:
        store: the layer's store.
        tokens, kernels: tokens of a kernel block, and kernel blocks of a page that holds tokens.
        tp_rank, tp: tensor-parallel rank, and number of ranks.

    Raises:
        GeometryError: the ranks can neither share nor copy the heads evenly, or the fields of a token page
            differ in heads.
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
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def _alignment(stored: StoredField) -> int:
    """Return the alignment of elements: the largest power of two, at most 16, that divides their size."""
    return gcd(stored.item_bytes, 16)
