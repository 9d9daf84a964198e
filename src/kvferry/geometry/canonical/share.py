"""The share of a chunk that the ranks of one machine hold.

An engine's ranks may run on several machines, each with host memory of its own. There a chunk is kept in
shares. A share is a chunk with fewer units (tensor parallelism) or layers (pipeline parallelism), so the
planner copies between ranks, shares and whole chunks as between any two geometries. What all ranks hold is in
every share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvferry.geometry.canonical.form import CanonicalForm, CanonicalGroup, FormSection, unit_count
from kvferry.geometry.page import Axis
from kvferry.geometry.rank import Layer, RankGeometry


def share_of(canonical: CanonicalForm, ranks: Sequence[RankGeometry]) -> CanonicalForm:
    """Return the form of the share that some ranks of an engine hold of its chunks.

    The share of all ranks is the whole chunk. A group of which the ranks hold no layer has no sections. If
    the ranks hold parts of a unit, or units that are not neighbours, the share also has what is between them.

    Example: ranks 2 and 3 of 4 hold the last 4 of 8 heads:

    >>> from kvferry.geometry.canonical.derive import canonical_form_of
    >>> from kvferry.tools.models.layout import EngineShape, lay_out
    >>> from kvferry.geometry.rank import GroupKind
    >>> from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
    >>> fields = tuple(StoredField(name, 2, 8, (("content", 8),)) for name in ("k", "v"))
    >>> model = ModelCache("m", (LayerCache(GroupKind.FULL, 0, fields),))
    >>> ranks = lay_out(model, EngineShape(4, (1,), 16, "LBNHC", 9))
    >>> whole = canonical_form_of(ranks, 16)
    >>> share = share_of(whole, ranks[2:])
    >>> share.groups[0].sections[0].held, whole.groups[0].content_bytes, share.groups[0].content_bytes
    (range(4, 8), 4096, 2048)
    >>> share_of(whole, ranks) == whole
    True
    """
    held: dict[str, list[Layer]] = {}
    for layer in (layer for rank in ranks for group in rank.groups for layer in group.layers):
        held.setdefault(layer.identity, []).append(layer)
    return CanonicalForm(canonical.chunk_tokens, tuple(_group(group, held) for group in canonical.groups))


def _group(group: CanonicalGroup, held: dict[str, list[Layer]]) -> CanonicalGroup:
    sections = (_section(section, held) for section in group.sections)
    return replace(group, sections=tuple(section for section in sections if section.parts))


def _section(section: FormSection, held: dict[str, list[Layer]]) -> FormSection:
    parts = tuple(part for part in section.parts if part.layer in held)
    if not (parts and section.axis):
        return replace(section, parts=parts)
    axes = [axis for part in parts for axis in _axes(held[part.layer], part.field, section.axis)]
    each, units = section.unit_elements, unit_count(section.total)
    low, high = min(axis.start for axis in axes) // each, -(-max(axis.stop for axis in axes) // each)
    return replace(section, parts=parts, held=None if high - low == units else range(low, high))


def _axes(layers: Iterable[Layer], field: str, name: str) -> Iterable[Axis]:
    found = (one.axis(name) for layer in layers for one in layer.page.fields if one.name == field)
    return (axis for axis in found if axis is not None)
