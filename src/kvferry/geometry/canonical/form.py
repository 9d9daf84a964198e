"""The order of the bytes of a chunk.

    chunk    [section][section]...                    each starts at a multiple of 4096 bytes, zero-padded
    section  [unit][unit]...                          one per sharded axis, and tokens per element
    unit     [layer][token][field][index][inner...]   all layers of the group; a snapshot has no token

A *section* holds all fields that are sharded along the same axis. A *unit* is a piece that the usual
tensor-parallel sizes do not split: a KV head, a state head, or a range of channels. Fields that every rank
holds whole are in a section of one unit. So a rank's part of a section is one contiguous range of units.

Opaque pages, whose bytes move only whole, are fields of one element per block, sharded by rank. So a chunk
holds whole blocks of them, and only engines with equal blocks and equally many ranks share such chunks.

The ranks of an engine on one machine hold a *share* of each chunk (`share.share_of`): the same sections, with
a range of their units and some of their layers.

In a chunk of a sliding-window group, the writer may have freed the first tokens already. Their bytes are
zero. `derive.content_alignment` tells where valid content begins.

K and V lie side by side per token, as in the pages of GPU attention backends. So one head of one layer is one
contiguous run on both sides if the engine's layout has heads outside of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, groupby
from math import gcd, prod

from kvferry.common.errors import GeometryError
from kvferry.geometry.page import SHARD, TOKEN, Axis, Field, PageFormat
from kvferry.geometry.rank import Group, GroupKind, Layer, RankGeometry, Region, Scale, group_label

# The version must change whenever equal bytes would have another meaning.
FORMAT = 2

# Sections start at multiples of this many bytes, so that storage can be read past the page cache directly
# into a chunk's memory.
ALIGNMENT = 4096

# Axes of at most this length have one unit per element.
EVERY_ELEMENT = 256

# Longer axes (channels) have gcd(length, FINEST) units. The usual tensor-parallel sizes divide 960.
FINEST = 960


def unit_count(total: int) -> int:
    """Return the number of units into which the sharded axis of a chunk's fields is divided.

    If the tensor-parallel size does not divide this number, ranks hold parts of units.

    >>> [unit_count(channels) for channels in (2048, 8192, 5120, 6144)]   # TP 10 divides 320, 6 divides 192
    [64, 64, 320, 192]
    """
    return total if total <= EVERY_ELEMENT else gcd(total, FINEST)


@dataclass(frozen=True, slots=True)
class SectionField:
    """One field of one layer in a section."""

    layer: str
    field: str
    item_bytes: int
    # (name, count) of all axes but the sharded one and tokens, innermost last: the order of the bytes
    inner: tuple[tuple[str, int], ...]
    scales: tuple[Scale, ...] = ()  # those with a single factor for all heads

    @property
    def element_bytes(self) -> int:
        """Bytes for one element of the sharded axis and one token, or for a whole snapshot."""
        return self.item_bytes * prod(count for _, count in self.inner)


@dataclass(frozen=True, slots=True)
class FormSection:
    """A section of a chunk, or of a machine's share of a chunk."""

    axis: str  # name of the sharded axis; "" for fields that every rank holds whole
    total: int  # elements of the axis over all ranks; 1 without an axis
    tokens: int  # per chunk; 0 for a snapshot
    parts: tuple[SectionField, ...]  # in memory order: by layer, then by field
    element_tokens: int = 1  # per element of the token axis, a divisor of `tokens`
    held: range | None = None  # the units in a share; None for all

    @property
    def elements(self) -> int:
        """Number of elements along the tokens of a chunk; 0 for a snapshot."""
        return self.tokens // self.element_tokens

    @property
    def first_unit(self) -> int:
        return 0 if self.held is None else self.held.start

    @property
    def units(self) -> int:
        return unit_count(self.total) if self.held is None else len(self.held)

    @property
    def unit_elements(self) -> int:
        return self.total // unit_count(self.total)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit over all layers and tokens of the chunk."""
        return max(self.elements, 1) * self.unit_elements * sum(part.element_bytes for part in self.parts)

    @property
    def bytes(self) -> int:
        return self.units * self.unit_bytes

    def layers(self) -> Iterator[tuple[str, tuple[SectionField, ...]]]:
        for name, parts in groupby(self.parts, lambda part: part.layer):
            yield name, tuple(parts)


@dataclass(frozen=True)
class CanonicalGroup:
    """The byte format of the chunks of all layers with the same attention: sections, in memory order."""

    kind: GroupKind
    attention_span: int
    sections: tuple[FormSection, ...]

    @property
    def label(self) -> str:
        return group_label(self)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(self._ends[:-1])

    @cached_property
    def chunk_bytes(self) -> int:
        """Size of a chunk, padding included: a multiple of `ALIGNMENT`."""
        return self._ends[-1]

    @cached_property
    def content_bytes(self) -> int:
        return sum(section.bytes for section in self.sections)

    @cached_property
    def _ends(self) -> list[int]:
        pages = (-(-section.bytes // ALIGNMENT) for section in self.sections)
        return list(accumulate((n * ALIGNMENT for n in pages), initial=0))


@dataclass(frozen=True)
class CanonicalForm:
    """The byte format of a model's chunks. It is equal for all engines that serve the model."""

    chunk_tokens: int
    groups: tuple[CanonicalGroup, ...]  # sorted by label

    @property
    def labels(self) -> list[str]:
        return [f"{number} {group.label}" for number, group in enumerate(self.groups)]

    @property
    def opaque(self) -> bool:
        """True if the meaning of some bytes is known only to the software that wrote them."""
        return any(section.axis == SHARD for group in self.groups for section in group.sections)

    def index(self, label: str) -> int:
        """Return the index of the group with this label; raise a KeyError if there is none."""
        return {group.label: number for number, group in enumerate(self.groups)}[label]

    def describe(self) -> Iterator[str]:
        """Yield lines of text that describe the byte format, but not the dtypes of elements."""
        yield f"kvferry canonical form {FORMAT}, chunks of {self.chunk_tokens} tokens"
        for group in self.groups:
            yield f"group {group.label}"
            for section in group.sections:
                each = f", one value per {section.element_tokens} tokens" * (section.element_tokens > 1)
                yield f"section {section.axis!r} {section.total} in {section.units} units{each}"
                for part in section.parts:
                    inner = " ".join(f"{name!r}:{count}" for name, count in part.inner)
                    scales = "".join(f" scaled {s.source!r}:{s.factors[0]!r}" for s in part.scales)
                    yield f"part {part.layer!r} {part.field!r} {part.item_bytes} bytes {inner}{scales}"

    @cached_property
    def content(self) -> str:
        """SHA-256 of the lines of `describe`, hexadecimal."""
        # Engines that serve one model with the same dtypes can share chunks if these digests are equal.
        return sha256("\n".join(self.describe()).encode()).hexdigest()


def chunk_pool(
    canonical: CanonicalForm,
    number: int,
    address: int,
    slots: int,
    stride: int = 0,
) -> RankGeometry:
    """Return the geometry of a memory pool for chunks of one KV cache group.

    A slot is described as a block, and the pool of each group as a pipeline rank. So
    ``build_templates(ranks of an engine, pool)`` plans stores, and ``build_templates(all pools, rank of an
    engine)`` plans loads.

    Example: two layers of 4 heads, with K and V of 8 elements of 2 bytes, in chunks of 16 tokens:

    >>> from kvferry.geometry.canonical.derive import canonical_form_of
    >>> from kvferry.tools.models.layout import EngineShape, lay_out
    >>> from kvferry.geometry.rank import GroupKind
    >>> from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
    >>> fields = tuple(StoredField(name, 2, 4, (("content", 8),)) for name in ("k", "v"))
    >>> model = ModelCache("tiny", (LayerCache(GroupKind.FULL, 0, fields),) * 2)
    >>> canonical = canonical_form_of(lay_out(model, EngineShape(2, (2,), 32, "BLNHC", 10)), 16)
    >>> pool = chunk_pool(canonical, 0, address=1 << 20, slots=8)
    >>> [(layer.address - (1 << 20), layer.block_stride) for layer in pool.groups[0].layers]
    [(0, 4096), (512, 4096)]
    >>> k, v = pool.groups[0].layers[0].page.fields
    >>> [(axis.name, axis.loops) for axis in v.axes], v.offset - k.offset  # 4 units of 1 head
    ([('head', ((4, 1024), (1, 16))), ('token', ((16, 32),)), ('content', ((8, 2),))], 16)

    Args:
        number: index of the group in `canonical.groups`.
        slots: number of slots. Slot 0, at `address`, is never read or written, like block 0 of an engine.
        stride: bytes from one slot to the next; 0 if slots lie side by side.
    """
    group = canonical.groups[number]
    stride = stride or group.chunk_bytes
    if stride < group.chunk_bytes or slots < 1:
        raise GeometryError(
            f"{slots} slots of {stride} bytes for chunks of {group.label}; expected 1 or more, each of at "
            f"least {group.chunk_bytes} bytes"
        )
    scales = {part.layer: part.scales for section in group.sections for part in section.parts}
    tokens = 0 if group.kind is GroupKind.STATE else canonical.chunk_tokens
    layers = tuple(
        _layer(name, fields, tokens, scales[name], address, stride) for name, fields in _fields(group).items()
    )
    groups = tuple(
        Group(other.kind, canonical.chunk_tokens, other.attention_span, layers if other is group else ())
        for other in canonical.groups
    )
    region = Region(address, (slots - 1) * stride + group.chunk_bytes)
    pool = RankGeometry(
        tp_rank=0,
        tp_size=1,
        pp_rank=number,
        pp_size=len(groups),
        num_blocks=slots,
        groups=groups,
        regions=(region,),
    )
    pool.check()
    return pool


def _fields(group: CanonicalGroup) -> dict[str, list[Field]]:
    found: dict[str, list[Field]] = defaultdict(list)
    for section, start in zip(group.sections, group.starts, strict=True):
        at = start
        for layer, parts in section.layers():
            pitch = section.unit_elements * sum(part.element_bytes for part in parts)
            offset = at
            for part in parts:
                found[layer].append(_field(section, part, offset, pitch))
                offset += section.unit_elements * part.element_bytes
            at += max(section.elements, 1) * pitch
    return found


def _field(section: FormSection, part: SectionField, offset: int, pitch: int) -> Field:
    axes = []
    if section.axis:
        loops = ((section.units, section.unit_bytes), (section.unit_elements, part.element_bytes))
        axes.append(Axis(section.axis, loops, section.first_unit * section.unit_elements, section.total))
    if section.elements:
        axes.append(Axis(TOKEN, ((section.elements, pitch),)))
    stride = part.element_bytes
    for name, count in part.inner:
        stride //= count
        axes.append(Axis(name, ((count, stride),)))
    return Field(part.field, part.item_bytes, offset, tuple(axes))


def _layer(
    name: str, fields: list[Field], tokens: int, scales: tuple[Scale, ...], address: int, stride: int
) -> Layer:
    # The page starts at the layer's first field. So equal layers have equal page formats, and the planner
    # plans their transfer only once.
    first = fields[0].offset
    placed = tuple(Field(f.name, f.item_bytes, f.offset - first, f.axes) for f in fields)
    page = PageFormat("canonical", tokens, max(f.extent()[1] for f in placed), placed)
    return Layer(name, address + first, stride, page, scales)
