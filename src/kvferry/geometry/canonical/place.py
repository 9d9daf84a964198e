"""Chunks in memory, as geometry; and which units of a chunk a rank has to do with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kvferry.errors import GeometryError
from kvferry.geometry.canonical.form import Canonical, CanonicalGroup, Part, Section
from kvferry.geometry.page import TOKEN, Axis, Field, PageFormat
from kvferry.geometry.rank import Group, Layer, RankGeometry, Region


def chunk_pool(
    canonical: Canonical,
    number: int,
    address: int,
    slots: int,
    stride: int = 0,
    memory: str = "DRAM",
    device: int = 0,
) -> RankGeometry:
    """Memory for chunks of one group, as the geometry of a rank: a block is a chunk, a block id a slot.

    Every group has a pool of its own, as if the canonical form were an engine whose pipeline ranks have a
    group each. So ``build_templates(engine's ranks, pool)`` is how chunks of the group are stored, and
    ``build_templates(all pools, an engine's rank)`` how they are loaded.

    Two layers of 4 heads, K and V of 8 elements of 2 bytes, in chunks of 16 tokens: heads are outermost.

    >>> from kvferry.geometry.canonical.derive import canonical_of
    >>> from kvferry.geometry.layout import EngineShape, lay_out
    >>> from kvferry.geometry.rank import GroupKind
    >>> from kvferry.geometry.store import LayerStore, ModelCache, Stored
    >>> fields = tuple(Stored(name, 2, 4, (("content", 8),)) for name in ("k", "v"))
    >>> model = ModelCache("tiny", (LayerStore(GroupKind.FULL, 0, fields),) * 2)
    >>> canonical = canonical_of(lay_out(model, EngineShape(2, (2,), 32, "BLNHC", 10)), 16)
    >>> pool = chunk_pool(canonical, 0, address=1 << 20, slots=8)
    >>> [(layer.address - (1 << 20), layer.block_stride) for layer in pool.groups[0].layers]
    [(0, 4096), (512, 4096)]
    >>> k, v = pool.groups[0].layers[0].page.fields
    >>> [(axis.name, axis.loops) for axis in v.axes], v.offset - k.offset
    ([('head', ((4, 1024), (1, 16))), ('token', ((16, 32),)), ('content', ((8, 2),))], 16)

    Args:
        canonical: what chunks are.
        number: of the group.
        address: of slot 0.
        slots: chunks that there is room for, slot 0 included: like block 0 of an engine it is the null slot,
            which nothing is moved to or from.
        stride: bytes from one slot to the next; 0: slots lie side by side.
        memory, device: as of `Region`.

    Raises:
        GeometryError: slots do not hold a chunk.
    """
    group = canonical.groups[number]
    stride = stride or group.chunk_bytes
    if stride < group.chunk_bytes or slots < 1:
        raise GeometryError(
            f"{slots} slots of {stride} bytes for chunks of {group.chunk_bytes} bytes ({group.label})"
        )
    layers = tuple(_layer(name, fields, address, stride) for name, fields in _fields(group).items())
    groups = tuple(
        Group(other.kind, canonical.chunk_tokens, other.reach, layers if other is group else ())
        for other in canonical.groups
    )
    region = Region(address, (slots - 1) * stride + group.chunk_bytes, memory, device)
    pool = RankGeometry(0, 1, number, len(groups), slots, groups, (region,))
    pool.check()
    return pool


def _fields(group: CanonicalGroup) -> dict[str, list[Field]]:
    """Fields of every layer, at their offsets in a chunk."""
    found: dict[str, list[Field]] = defaultdict(list)
    for section, start in zip(group.sections, group.starts, strict=True):
        at = start
        for layer, parts in section.layers():
            pitch = section.unit_elements * sum(part.element_bytes for part in parts)
            inside = at
            for part in parts:
                found[layer].append(_field(section, part, inside, pitch))
                inside += section.unit_elements * part.element_bytes
            at += max(section.tokens, 1) * pitch
    return found


def _field(section: Section, part: Part, offset: int, pitch: int) -> Field:
    """A part as a field; `pitch` is bytes from one token to the next."""
    axes = []
    if section.axis:
        loops = ((section.units, section.unit_bytes), (section.unit_elements, part.element_bytes))
        axes.append(Axis(section.axis, loops))
    if section.tokens:
        axes.append(Axis(TOKEN, ((section.tokens, pitch),)))
    stride = part.element_bytes
    for name, count in part.inner:
        stride //= count
        axes.append(Axis(name, ((count, stride),)))
    return Field(part.field, part.item_bytes, offset, tuple(axes))


def _layer(name: str, fields: list[Field], address: int, stride: int) -> Layer:
    """A layer whose page begins at its first field: equal layers have equal pages, which are planned once."""
    first = fields[0].offset
    placed = tuple(Field(f.name, f.item_bytes, f.offset - first, f.axes) for f in fields)
    tokens = max((axis.count for f in placed if (axis := f.axis(TOKEN))), default=0)
    page = PageFormat("canonical", tokens, max(f.extent()[1] for f in placed), placed)
    return Layer(name, address + first, stride, page)


@dataclass(frozen=True, slots=True)
class Touched:
    """The units of one section that a rank has to do with.

    Attributes:
        units: those of which it holds anything, and what is between them.
        whole: those of which it holds everything; empty on a pipeline rank without all the layers.
    """

    units: range
    whole: range


def units_touched(group: CanonicalGroup, rank: RankGeometry) -> tuple[Touched, ...]:
    """Which units of a chunk lie wholly or in part in a rank's slice, by section.

    2 KV heads on 4 ranks, and a pipeline rank without the other half of the layers:

    >>> from kvferry.geometry.canonical.derive import canonical_of
    >>> from kvferry.geometry.layout import EngineShape, lay_out
    >>> from kvferry.geometry.rank import GroupKind
    >>> from kvferry.geometry.store import LayerStore, ModelCache, Stored
    >>> model = ModelCache("gqa", (LayerStore(GroupKind.FULL, 0, (Stored("k", 2, 2),)),) * 2)
    >>> tp4 = lay_out(model, EngineShape(4, (2,), 16, "LBHNC", 10))
    >>> (group,) = canonical_of(tp4, 16).groups
    >>> [units_touched(group, rank)[0].whole for rank in tp4]
    [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    >>> units_touched(group, lay_out(model, EngineShape(1, (1, 1), 16, "LBHNC", 10))[0])
    (Touched(units=range(0, 2), whole=range(0, 0)),)
    """
    held = {
        (layer.name, field.name): field
        for of in rank.groups
        for layer in of.layers
        for field in layer.page.fields
    }
    return tuple(
        _touched(section, [held.get((p.layer, p.field)) for p in section.parts]) for section in group.sections
    )


def _touched(section: Section, fields: list[Field | None]) -> Touched:
    """`fields` are those of the section's parts, None where the rank has none."""
    size = section.unit_elements
    ranges = [_range(section, field) for field in fields if field is not None]
    if not ranges:
        return Touched(range(0), range(0))
    units = range(min(start for start, _ in ranges) // size, -(-max(stop for _, stop in ranges) // size))
    first, last = -(-max(start for start, _ in ranges) // size), min(stop for _, stop in ranges) // size
    if None in fields or first >= last:
        return Touched(units, range(0))
    return Touched(units, range(first, last))


def _range(section: Section, field: Field) -> tuple[int, int]:
    """What a rank holds of the section's axis."""
    axis = field.axis(section.axis)
    return (axis.start, axis.stop) if axis else (0, 1)
