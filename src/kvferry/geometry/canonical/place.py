"""The geometry of a pool of chunks in memory."""

from __future__ import annotations

from collections import defaultdict

from kvferry.errors import GeometryError
from kvferry.geometry.canonical.form import CanonicalForm, CanonicalGroup, FormSection, SectionField
from kvferry.geometry.page import TOKEN, Axis, Field, PageFormat
from kvferry.geometry.rank import Group, Layer, RankGeometry, Region, Scale


def chunk_pool(
    canonical: CanonicalForm,
    number: int,
    address: int,
    slots: int,
    stride: int = 0,
) -> RankGeometry:
    """Return the geometry of a memory pool for chunks of one KV cache group.

    A slot is described as a block. Every group has its own pool, which is described as one pipeline rank.
    ``build_templates(ranks of an engine, pool)`` plans how the group's chunks are stored, and
    ``build_templates(all pools, rank of an engine)`` plans how chunks are loaded.

    Example: two layers of 4 heads, with K and V of 8 elements of 2 bytes, in chunks of 16 tokens. Heads are
    the outermost axis.

    >>> from kvferry.geometry.canonical.derive import canonical_form_of
    >>> from kvferry.geometry.layout import EngineShape, lay_out
    >>> from kvferry.geometry.rank import GroupKind
    >>> from kvferry.geometry.store import LayerCache, ModelCache, StoredField
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
        address: address of slot 0.
        slots: number of slots, slot 0 included. Slot 0 is the null slot, like block 0 of an engine, and is
            never read or written.
        stride: bytes from one slot to the next; 0 if slots lie side by side.

    Raises:
        GeometryError: `slots` is below 1, or `stride` is smaller than a chunk.
    """
    group = canonical.groups[number]
    stride = stride or group.chunk_bytes
    if stride < group.chunk_bytes or slots < 1:
        raise GeometryError(
            f"{slots} slots of {stride} bytes for chunks of {group.label}; expected 1 or more, each of at "
            f"least {group.chunk_bytes} bytes"
        )
    scales = {part.layer: part.scales for section in group.sections for part in section.parts}
    layers = tuple(
        _layer(name, fields, scales[name], address, stride) for name, fields in _fields(group).items()
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
    """Return the fields of a group's chunks by layer name, with byte offsets from the start of the chunk."""
    found: dict[str, list[Field]] = defaultdict(list)
    for section, start in zip(group.sections, group.starts, strict=True):
        at = start
        for layer, parts in section.layers():
            pitch = section.unit_elements * sum(part.element_bytes for part in parts)
            offset = at
            for part in parts:
                found[layer].append(_field(section, part, offset, pitch))
                offset += section.unit_elements * part.element_bytes
            at += max(section.tokens, 1) * pitch
    return found


def _field(section: FormSection, part: SectionField, offset: int, pitch: int) -> Field:
    """Return one field in a chunk, whose tokens are `pitch` bytes apart."""
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


def _layer(name: str, fields: list[Field], scales: tuple[Scale, ...], address: int, stride: int) -> Layer:
    """Return the geometry of one layer in a pool of chunks."""
    # The page starts at the layer's first field. So equal layers have equal page formats, and the planner
    # plans their transfer only once.
    first = fields[0].offset
    placed = tuple(Field(f.name, f.item_bytes, f.offset - first, f.axes) for f in fields)
    tokens = max((axis.count for f in placed if (axis := f.axis(TOKEN))), default=0)
    page = PageFormat("canonical", tokens, max(f.extent()[1] for f in placed), placed)
    return Layer(name, address + first, stride, page, scales)
