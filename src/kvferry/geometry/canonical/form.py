"""The order of the bytes of a chunk.

    chunk    [section][section]...                    each from a page (4096 bytes) on, padded with zeros
    section  [unit][unit]...                          one per (axis, total) that fields are sharded by
    unit     [layer][token][field][index][inner...]   all layers of the group; a snapshot has no token

A *unit* is a piece that tensor parallelism gives to a rank as a whole: a KV head, a state head, a stretch of
channels. A field that every rank has whole is in a section of one unit. So a rank's slice is one contiguous
run of units per section. Sections begin at pages, so that storage can be read into a chunk's memory directly.
All bytes except this padding are content.

In a chunk of a sliding-window group, tokens that the writer had already freed are zeros.
`length.content_alignment` says where valid content begins.

K and V lie side by side per token, as GPU backends keep them: one head of one layer is then one run on both
sides where the engine keeps heads outside of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, groupby
from math import gcd, prod

from kvferry.geometry.rank import GroupKind, Scale, group_label

FORMAT = 2
"""Format number; it changes when the same bytes would have another meaning."""

ALIGNMENT = 4096
"""Bytes of a page: sections begin at multiples of it."""

EVERY_ELEMENT = 256
"""Axes up to this long have a unit per element."""

FINEST = 960
"""Longer axes (channels) have gcd(length, FINEST) units; the usual parallel sizes divide FINEST."""


def unit_count(total: int) -> int:
    """Return the number of units of an axis of `total` elements over all ranks.

    A tensor-parallel size that divides this number gives every rank whole units. Any other split works too,
    with parts of units at its edges.

    >>> [unit_count(heads) for heads in (1, 8, 25, 128)]
    [1, 8, 25, 128]
    >>> [unit_count(channels) for channels in (2048, 8192, 5120, 6144)]   # 5120: TP 5, 10; 6144: 3, 6
    [64, 64, 320, 192]
    """
    return total if total <= EVERY_ELEMENT else gcd(total, FINEST)


@dataclass(frozen=True, slots=True)
class SectionField:
    """One field of one layer, as a section keeps it.

    Attributes:
        layer, field: names, as in every engine.
        item_bytes: bytes of one element.
        inner: (name, count) of all axes except the sharded one and the token axis, the last one fastest.
        scales: as in `Layer`, with one factor each.
    """

    layer: str
    field: str
    item_bytes: int
    inner: tuple[tuple[str, int], ...]
    scales: tuple[Scale, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes at one index of the section's axis, for one token or for a snapshot."""
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class FormSection:
    """The fields of a chunk that are sharded along one axis.

    Two layers of 4 KV heads in chunks of 16 tokens, K and V of 8 elements of 2 bytes: 4 units of 2 · 16 · 32
    bytes.

    >>> named = [(layer, field) for layer in ("a", "b") for field in ("k", "v")]
    >>> parts = [SectionField(layer, field, 2, (("content", 8),)) for layer, field in named]
    >>> section = FormSection("head", 4, 16, tuple(parts))
    >>> section.units, section.unit_bytes, section.bytes
    (4, 1024, 4096)

    Attributes:
        axis: name of the axis; "" for fields that every rank has whole.
        total: elements of the axis over all ranks; 1 without an axis.
        tokens: tokens of a chunk; 0 for a snapshot.
        parts: fields by layer in the model's order; within a layer in memory order.
    """

    axis: str
    total: int
    tokens: int
    parts: tuple[SectionField, ...]

    @property
    def units(self) -> int:
        """Number of units."""
        return unit_count(self.total)

    @property
    def unit_elements(self) -> int:
        """Elements of the axis per unit: 1 for heads, more for channels."""
        return self.total // self.units

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, over all layers and all tokens."""
        return max(self.tokens, 1) * self.unit_elements * sum(part.element_bytes for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of all units."""
        return self.units * self.unit_bytes

    def layers(self) -> Iterator[tuple[str, tuple[SectionField, ...]]]:
        """Yield the name and the parts of every layer, in order."""
        for name, parts in groupby(self.parts, lambda part: part.layer):
            yield name, tuple(parts)


@dataclass(frozen=True)
class CanonicalGroup:
    """The form of a chunk of one group: all layers that need the same tokens for a continuation.

    An engine may spread these layers over several groups of its own, each with a block table.

    Attributes:
        kind, attention_span: as in `Group`.
        sections: sections in memory order.
    """

    kind: GroupKind
    attention_span: int
    sections: tuple[FormSection, ...]

    @property
    def label(self) -> str:
        """Name, the same as `Group.label` of every engine's group that is part of it."""
        return group_label(self.kind, self.attention_span)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of the first byte of every section."""
        return tuple(self._ends[:-1])

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, padding included: whole pages."""
        return self._ends[-1]

    @cached_property
    def content_bytes(self) -> int:
        """Bytes of a chunk without padding."""
        return sum(section.bytes for section in self.sections)

    @cached_property
    def _ends(self) -> list[int]:
        pages = (-(-section.bytes // ALIGNMENT) for section in self.sections)
        return list(accumulate((n * ALIGNMENT for n in pages), initial=0))


@dataclass(frozen=True)
class CanonicalForm:
    """The form of a model's chunks, the same value from every engine that serves the model.

    Attributes:
        chunk_tokens: tokens of a chunk.
        groups: groups by label.
    """

    chunk_tokens: int
    groups: tuple[CanonicalGroup, ...]

    @property
    def labels(self) -> list[str]:
        """Return the labels of the groups with their numbers, for messages."""
        return [f"{number} {group.label}" for number, group in enumerate(self.groups)]

    def index(self, label: str) -> int:
        """Return the number of the group with this label.

        Raises:
            KeyError: no group has it.
        """
        return {group.label: number for number, group in enumerate(self.groups)}[label]

    def describe(self) -> Iterator[str]:
        """Yield lines of text with everything that decides the meaning of the bytes.

        The lines distinguish elements by size only. The comparison of models must check the dtype.
        """
        yield f"kvferry canonical form {FORMAT}, chunks of {self.chunk_tokens} tokens"
        for group in self.groups:
            yield f"group {group.label}"
            for section in group.sections:
                yield f"section {section.axis!r} {section.total} in {section.units} units"
                for part in section.parts:
                    inner = " ".join(f"{name!r}:{count}" for name, count in part.inner)
                    scales = "".join(f" scaled {s.source!r}:{s.factors[0]!r}" for s in part.scales)
                    yield f"part {part.layer!r} {part.field!r} {part.item_bytes} bytes {inner}{scales}"

    @cached_property
    def content(self) -> str:
        """SHA-256 of `describe`, hexadecimal. An engine reads chunks of equal content as its own."""
        return sha256("\n".join(self.describe()).encode()).hexdigest()
