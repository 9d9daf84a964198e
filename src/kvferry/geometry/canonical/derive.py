"""Derivation of the canonical form of stored chunks from the geometry of an engine's ranks.

The form must not depend on the engine's settings. So the name of an axis decides whether it is sharded,
layers are sorted by name, and layers with the same attention form one group, however an engine distributes
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.errors import GeometryError
from kvferry.geometry.canonical.form import CanonicalForm, CanonicalGroup, FormSection, SectionField
from kvferry.geometry.page import TOKEN, Field
from kvferry.geometry.rank import Attention, Group, GroupKind, Layer, RankGeometry, group_label

# Axes that tensor parallelism shards. If a field has both (channels of a head), ``head`` is sharded. The
# geometry of an engine with one rank does not show which axis that is, so the name must decide.
SHARDED = ("head", "channel")


def canonical_form_of(ranks: Sequence[RankGeometry], chunk_tokens: int) -> CanonicalForm:
    """Return the canonical form of the chunks that an engine stores.

    Example: two engines serve the same model, which has 2 KV heads. The first engine runs at TP 4, so each
    head is on two ranks. The second engine runs at TP 2. Both have the same form:

    >>> from kvferry.geometry.layout import EngineShape, lay_out
    >>> from kvferry.geometry.store import LayerCache, ModelCache, StoredField
    >>> fields = tuple(StoredField(name, 2, 2, (("content", 128),)) for name in ("k", "v"))
    >>> model = ModelCache("gqa", (LayerCache(GroupKind.FULL, 0, fields),) * 4)
    >>> tp4 = canonical_form_of(lay_out(model, EngineShape(4, (2, 2), 128, "LBHNC", 10)), 256)
    >>> tp2 = canonical_form_of(lay_out(model, EngineShape(2, (4,), 16, "BLNHC", 10)), 256)
    >>> tp4 == tp2, tp4.content == tp2.content
    (True, True)
    >>> [(s.axis, s.units, s.unit_bytes) for s in tp2.groups[0].sections]   # 4 layers, 256 tokens, K and V
    [('head', 2, 524288)]

    A Mamba2 state has a section sharded by head and two sections sharded by channel:

    >>> from kvferry.geometry.page import Axis, PageFormat
    >>> from kvferry.geometry.rank import Region
    >>> def conv(name, at, channels):
    ...     axes = Axis("channel", ((channels, 2),)), Axis("width", ((3, 2 * 3072),))
    ...     return Field(name, 2, at, axes)
    >>> ssm = Axis("head", ((32, 32768),)), Axis("channel", ((64, 512),)), Axis("state", ((128, 4),))
    >>> fields = conv("conv.x", 0, 2048), conv("conv.b", 4096, 512), conv("conv.c", 5120, 512)
    >>> page = PageFormat("MAMBA2", 0, 1067008, (*fields, Field("ssm", 4, 18432, ssm)))
    >>> group = Group(GroupKind.STATE, 128, 0, (Layer("layers.0", 0, 1067008, page),))
    >>> mamba = RankGeometry(0, 1, 0, 1, 4, (group,), (Region(0, 4 * 1067008),))
    >>> [(s.axis, s.total, s.units, s.unit_bytes) for s in canonical_form_of([mamba], 256).groups[0].sections]
    [('head', 32, 32, 32768), ('channel', 512, 64, 96), ('channel', 2048, 64, 192)]

    Args:
        ranks: geometry of all ranks of one engine, in any order.

    Raises:
        GeometryError: a rank is missing, ranks describe a layer differently, or a layer has no canonical
            form: the inner structure of its pages is unknown, a field has one value per block or is sharded
            along an axis not in `SHARDED`, or quantised KV has a scale per head.
    """
    if chunk_tokens < 1:
        raise GeometryError(f"chunks of {chunk_tokens} tokens; expected 1 or more")
    _check_complete(ranks)
    stored: dict[str, _StoredLayer] = {}
    for rank in ranks:
        for group in rank.groups:
            for layer in group.layers:
                found = _stored(group, layer)
                if stored.setdefault(layer.identity, found) != found:
                    raise GeometryError(
                        f"layer {layer.name!r}: ranks of one engine describe it differently, "
                        f"{found} and {stored[layer.identity]}"
                    )
    kinds = sorted({of.attention for of in stored.values()}, key=group_label)
    return CanonicalForm(chunk_tokens, tuple(_group(kind, stored, chunk_tokens) for kind in kinds))


@dataclass(frozen=True, slots=True)
class _StoredLayer:
    """The properties of a layer's cache that are the same on all ranks.

    Attributes:
        fields: (name of the sharded axis, number of its elements over all ranks, field) for each field. The
            first two are "" and 1 for a field without an axis in `SHARDED`, such as an MLA latent.
    """

    attention: Attention
    fields: tuple[tuple[str, int, SectionField], ...]


def _check_complete(ranks: Sequence[RankGeometry]) -> None:
    have = sorted((rank.pp_rank, rank.tp_rank) for rank in ranks)
    sizes = {(rank.pp_size, rank.tp_size) for rank in ranks}
    if len(sizes) == 1:
        (pp, tp) = sizes.pop()
        if have == [(stage, rank) for stage in range(pp) for rank in range(tp)]:
            return
    raise GeometryError(f"the canonical form needs every rank of one engine once, these are {have}")


def _stored(group: Group, layer: Layer) -> _StoredLayer:
    """Return the properties of a layer's cache that are the same on all ranks.

    Raises:
        GeometryError: the layer cannot be stored in chunks that other engines read.
    """
    if layer.page.opaque:
        raise GeometryError(
            f"layer {layer.name!r}: {layer.page.content} has no canonical form, its bytes are opaque; "
            "it can be handed over to an equal engine, but not be stored"
        )
    if any(len(scale.factors) > 1 for scale in layer.scales):
        raise GeometryError(
            f"layer {layer.name!r}: its quantised cache has a scale per head, which the canonical form "
            "cannot hold; it can be handed over to an engine of equal scales, but not be stored"
        )
    found = [_sharded(layer, field, group.kind) for field in layer.page.fields]
    # The largest elements come first, so that every field in a chunk is aligned.
    found.sort(key=lambda one: (-one[2].item_bytes, one[2].field))
    return _StoredLayer(Attention(group.kind, group.attention_span), tuple(found))


def _sharded(layer: Layer, field: Field, kind: GroupKind) -> tuple[str, int, SectionField]:
    """Return a field as in `_StoredLayer.fields`.

    Raises:
        GeometryError: the field cannot be stored in chunks that other engines read.
    """
    axis = next((axis for axis in map(field.axis, SHARDED) if axis is not None), None)
    name, total = (axis.name, axis.total) if axis else ("", 1)
    if others := [other for other, _, _ in field.held if other != name]:
        raise GeometryError(
            f"layer {layer.name!r}: field {field.name!r} is sharded along {others[0]!r}; "
            f"the canonical form knows {', '.join(SHARDED)}"
        )
    if kind is not GroupKind.STATE and field.axis(TOKEN) is None:
        raise GeometryError(
            f"layer {layer.name!r}: field {field.name!r} has one value per block; "
            "the canonical form has only what every token has, since blocks differ between engines"
        )
    inner = tuple((one.name, one.count) for one in field.axes if one.name not in (TOKEN, name))
    return name, total, SectionField(layer.identity, field.name, field.item_bytes, inner, layer.scales)


def _group(attention: Attention, stored: dict[str, _StoredLayer], chunk_tokens: int) -> CanonicalGroup:
    sections: dict[tuple[str, int], list[SectionField]] = {}
    for layer in sorted(stored, key=_by_number):
        if stored[layer].attention == attention:
            for axis, total, part in stored[layer].fields:
                sections.setdefault((axis, total), []).append(part)
    tokens = 0 if attention.kind is GroupKind.STATE else chunk_tokens
    found = [FormSection(axis, total, tokens, tuple(parts)) for (axis, total), parts in sections.items()]
    return CanonicalGroup(attention.kind, attention.attention_span, tuple(sorted(found, key=_by_element)))


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for layer names that compares numbers by value: layers.9 comes before layers.10."""
    words: Iterable[str] = re.split(r"(\d+)", name)
    return tuple((0, int(word), word) if word.isdecimal() else (1, 0, word) for word in words)


def _by_element(section: FormSection) -> tuple[int, str, int]:
    """Return a sort key by the size of the largest element, largest first, then by the sharded axis."""
    return (-max(part.item_bytes for part in section.parts), section.axis, section.total)
