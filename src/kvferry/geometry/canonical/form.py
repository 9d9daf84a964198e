"""The order of the bytes of a chunk.

    chunk    [section][section]...                    each starts at a multiple of 4096 bytes, zero-padded
    section  [unit][unit]...                          one section per sharded axis (name and length)
    unit     [layer][token][field][index][inner...]   all layers of the group; a snapshot has no token

A *chunk* holds a fixed number of tokens of one KV cache group, or one snapshot of recurrent state. A
*section* holds all fields that are sharded along the same axis. A *unit* is a piece that the usual
tensor-parallel sizes do not split: a KV head, a state head, or a range of channels. Fields that every rank
holds whole are in a section of one unit. So a rank's part of a section is one contiguous range of units.
Sections start at multiples of 4096 bytes, so that storage can be read directly into a chunk's memory. All
bytes except the padding between sections are content.

In a chunk of a sliding-window group, the writer may have freed the first tokens already. Their bytes are
zero. `length.content_alignment` tells where valid content begins.

K and V lie side by side per token, as in the pages of GPU attention backends. So one head of one layer is one
contiguous run on both sides if the engine's layout has heads outside of tokens.
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
"""Version of the format. It must change whenever equal bytes would have another meaning."""

ALIGNMENT = 4096
"""Alignment of sections in bytes: every section starts at a multiple of it."""

EVERY_ELEMENT = 256
"""Maximum length of an axis that has one unit per element."""

FINEST = 960
"""Longer axes (channels) have gcd(length, FINEST) units. The usual tensor-parallel sizes divide FINEST."""


def unit_count(total: int) -> int:
    """Return the number of units into which the sharded axis of a chunk's fields is divided.

    A unit is one element (e.g. one KV head) of an axis of at most 256 elements, and usually several adjacent
    elements (channels) of a longer axis. If the tensor-parallel size divides the number of units, every rank
    holds whole units. Other sizes work too, but then ranks hold parts of units.

    >>> [unit_count(heads) for heads in (1, 8, 25, 128)]
    [1, 8, 25, 128]
    >>> [unit_count(channels) for channels in (2048, 8192, 5120, 6144)]   # TP 10 divides 320, 6 divides 192
    [64, 64, 320, 192]

    Args:
        total: number of elements of the axis (heads or channels) over all ranks.
    """
    return total if total <= EVERY_ELEMENT else gcd(total, FINEST)


@dataclass(frozen=True, slots=True)
class SectionField:
    """One field of one layer in a section (the fields of a chunk that are sharded along the same axis).

    Attributes:
        layer, field: names of the layer and of the field, the same in every engine.
        item_bytes: bytes of one value of the field's dtype.
        inner: (name, count) of all axes except the sharded axis and the token axis, with the innermost axis
            last.
        scales: quantisation scales of the layer, each with a single factor for all heads; empty if there are
            none.
    """

    layer: str
    field: str
    item_bytes: int
    inner: tuple[tuple[str, int], ...]
    scales: tuple[Scale, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of the field for one element of the sharded axis (e.g. one head) and one token.

        For recurrent state, bytes for one element in a whole snapshot.
        """
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class FormSection:
    """A section of a chunk: all fields that are sharded along the same axis.

    A section is divided into units. A unit is e.g. one KV head or a range of channels, with all layers and
    tokens.

    Example: two layers of 4 KV heads in chunks of 16 tokens. K and V have 8 elements of 2 bytes, so a head
    takes 32 bytes per token. The section has 4 units of 2 · 16 · 32 bytes.

    >>> named = [(layer, field) for layer in ("a", "b") for field in ("k", "v")]
    >>> parts = [SectionField(layer, field, 2, (("content", 8),)) for layer, field in named]
    >>> section = FormSection("head", 4, 16, tuple(parts))
    >>> section.units, section.unit_bytes, section.bytes
    (4, 1024, 4096)

    Attributes:
        axis: name of the sharded axis; "" for fields that every rank holds whole.
        total: number of elements of the axis over all ranks; 1 without an axis.
        tokens: number of tokens per chunk; 0 for a snapshot (recurrent state at one position).
        parts: fields of all layers, in memory order: by layer, then by field.
    """

    axis: str
    total: int
    tokens: int
    parts: tuple[SectionField, ...]

    @property
    def units(self) -> int:
        """Number of units in the section (the fields of a chunk that are sharded along one axis).

        A unit is e.g. one KV head or a range of channels, with all layers and tokens.
        """
        return unit_count(self.total)

    @property
    def unit_elements(self) -> int:
        """Number of elements of the sharded axis (heads or channels) per unit.

        The number is 1 if the axis has at most `EVERY_ELEMENT` elements, and usually larger otherwise.
        """
        return self.total // self.units

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit (e.g. one KV head) over all layers and tokens of the chunk."""
        return max(self.tokens, 1) * self.unit_elements * sum(part.element_bytes for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the section (the fields of a chunk that are sharded along one axis), without padding."""
        return self.units * self.unit_bytes

    def layers(self) -> Iterator[tuple[str, tuple[SectionField, ...]]]:
        """Yield (name, fields) of every layer in the section, in memory order.

        A section has the fields of a chunk that are sharded along one axis.
        """
        for name, parts in groupby(self.parts, lambda part: part.layer):
            yield name, tuple(parts)


@dataclass(frozen=True)
class CanonicalGroup:
    """The byte format of the chunks of all layers with the same kind and attention span.

    An engine may distribute these layers over several KV cache groups, each with its own block table.

    Attributes:
        kind: kind of attention or state of the layers.
        attention_span: window in tokens for SLIDING, attention chunk in tokens for CHUNKED, 0 otherwise.
        sections: parts of a chunk in memory order; a section has all fields that are sharded along one axis.
    """

    kind: GroupKind
    attention_span: int
    sections: tuple[FormSection, ...]

    @property
    def label(self) -> str:
        """Name of the group, e.g. ``sliding_window(64)``.

        The name equals the `Group.label` of the engine's KV cache groups whose layers belong to this group.
        """
        return group_label(self.kind, self.attention_span)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Byte offset of every section in the chunk.

        A section has all fields that are sharded along one axis.
        """
        return tuple(self._ends[:-1])

    @cached_property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes, padding included: a multiple of `ALIGNMENT`."""
        return self._ends[-1]

    @cached_property
    def content_bytes(self) -> int:
        """Size of a chunk in bytes, without padding."""
        return sum(section.bytes for section in self.sections)

    @cached_property
    def _ends(self) -> list[int]:
        pages = (-(-section.bytes // ALIGNMENT) for section in self.sections)
        return list(accumulate((n * ALIGNMENT for n in pages), initial=0))


@dataclass(frozen=True)
class CanonicalForm:
    """The byte format of a model's chunks. It is equal for all engines that serve the model.

    Attributes:
        chunk_tokens: number of tokens per chunk.
        groups: format of the chunks of each group, sorted by label. A group has all layers of one kind and
            attention span.
    """

    chunk_tokens: int
    groups: tuple[CanonicalGroup, ...]

    @property
    def labels(self) -> list[str]:
        """Index and label of each group as text, e.g. ``0 full_attention``, for error messages."""
        return [f"{number} {group.label}" for number, group in enumerate(self.groups)]

    def index(self, label: str) -> int:
        """Return the index in `groups` of the group with this label.

        Raises:
            KeyError: no group has this label.
        """
        return {group.label: number for number, group in enumerate(self.groups)}[label]

    def describe(self) -> Iterator[str]:
        """Yield lines of text that describe the byte format: order, sizes and scales of a chunk's fields.

        Two forms with equal lines have the same byte format, but their dtypes may differ: the lines contain
        only the sizes of elements. A caller that compares models must also compare their dtypes.
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
        """SHA-256 of the lines of `describe`, hexadecimal.

        Two engines that serve the same model with the same dtypes can share chunks if these digests are
        equal.
        """
        return sha256("\n".join(self.describe()).encode()).hexdigest()
