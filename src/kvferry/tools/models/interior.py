"""The inner structure of one rank's page: a box of (heads, tokens, content bytes).

The content of a head and token holds all fields side by side. A snapshot holds its fields one after the
other, each ``[heads][inner axes]``, so its box is (1, 1, bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kvferry.common.errors import GeometryError
from kvferry.geometry import TOKEN, Axis, Field, GroupKind, PageFormat, PageMap
from kvferry.tools.models.store import LayerCache, StoredField

# The axis of stored entries, in pages where one entry stands for several tokens.
STATE = "state"


def _shard_heads(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (index of the first head, number of heads) that a tensor-parallel rank holds.

    >>> [_shard_heads(heads, 1, 4) for heads in (8, 2)]
    [(2, 2), (0, 1)]
    """
    if heads % ranks == 0:
        return rank * (heads // ranks), heads // ranks
    if ranks % heads == 0:
        # Neighbouring ranks hold copies of the same head.
        return rank // (ranks // heads), 1
    raise GeometryError(
        f"{heads} heads on {ranks} tensor-parallel ranks: choose a size that divides {heads}, "
        "or a multiple of it"
    )


@dataclass(frozen=True, slots=True)
class _PlacedField:
    """A field and its position inside a page."""

    stored: StoredField
    # `start`, `count`: heads on this rank; (0, 1) without heads.
    start: int
    count: int
    offset: int  # byte offset in a snapshot, otherwise in one head's bytes for one token or entry

    def field(self, head_stride: int, tokens: tuple[tuple[int, int], ...], entries: str = TOKEN) -> Field:
        """Return the field of a page, from (count, stride in bytes) of loops over its tokens or entries."""
        axes = [Axis(entries, tokens)] if tokens else []
        if self.stored.heads:
            axes.insert(0, Axis("head", ((self.count, head_stride),), self.start, self.stored.heads))
        stride = self.stored.item_bytes
        inner: list[Axis] = []
        for name, count in reversed(self.stored.inner):
            inner.insert(0, Axis(name, ((count, stride),)))
            stride *= count
        return Field(self.stored.name, self.stored.item_bytes, self.offset, (*axes, *inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInterior:
    """The inner structure of one rank's page."""

    snapshot: bool
    state_tokens: int
    # `kernels`, `heads`, `tokens`: number of kernel blocks in the page, of this rank's heads, and of entries
    # in a kernel block; 1 for a snapshot.
    kernels: int
    heads: int
    tokens: int
    content: int  # bytes of all fields of one head in one entry; for a snapshot, bytes of the whole page
    alignment: int  # bytes of which the page's address is a multiple
    placed_fields: tuple[_PlacedField, ...]

    @property
    def page_bytes(self) -> int:
        return self.kernels * self.heads * self.tokens * self.content

    def page(self, where: PageMap) -> PageFormat:
        _, kernel, head, token, _ = where.strides
        if self.snapshot:
            fields = tuple(part.field(part.stored.head_bytes, ()) for part in self.placed_fields)
            return PageFormat("state", 0, self.content, fields)
        if self.state_tokens > 1:
            whole = tuple(part.field(head, ((self.tokens, token),), STATE) for part in self.placed_fields)
            return PageFormat("compressed", self.tokens * self.state_tokens, self.page_bytes, whole)
        split = ((self.kernels, kernel),) if self.kernels > 1 else ()
        fields = tuple(part.field(head, (*split, (self.tokens, token))) for part in self.placed_fields)
        reach = max(field.extent()[1] for field in fields)
        return PageFormat("packed", self.kernels * self.tokens, reach, fields)


def page_interior(store: LayerCache, tokens: int, kernels: int, tp_rank: int, tp: int) -> PageInterior:
    """Return the inner structure of one rank's page, of `kernels` kernel blocks of `tokens` tokens.

    Raises:
        GeometryError: the fields cannot be distributed over the ranks, or cannot share a page.
    """
    held = [_shard_heads(stored.heads, tp_rank, tp) if stored.heads else (0, 1) for stored in store.fields]
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
        placed_fields.append(_PlacedField(stored, start, count, at))
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
    # So that fields can be viewed as tensors, whose addresses must be multiples of the element's size.
    return gcd(stored.item_bytes, 16)
