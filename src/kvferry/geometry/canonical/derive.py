"""The canonical form of an engine's chunks, and the number of tokens of a chunk.

The form must not depend on the engine's settings. So the name of an axis decides whether it is sharded,
layers are sorted by name, and layers with the same attention form one group, however an engine distributes
them. A chunk should end where blocks of windows and snapshots end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import lcm
from typing import TypeAlias

from kvferry.common.errors import ConfigError, GeometryError
from kvferry.geometry.canonical.form import CanonicalForm, CanonicalGroup, FormSection, SectionField
from kvferry.geometry.page import SHARD, TOKEN, Field
from kvferry.geometry.rank import Attention, GroupKind, GroupPattern, Layer, RankGeometry, group_label

# Axes that tensor parallelism shards. If a field has several (channels of a head), the first is sharded. The
# geometry of an engine with one rank does not show which axis that is, so the name must decide.
SHARDED = (SHARD, "head", "channel")

# The default, before it is adjusted to the snapshot interval and to the block size of windows.
CHUNK_TOKENS = 256

# Alignment in tokens of valid content in chunks of short windows: a multiple of the usual block sizes of
# sliding-window groups. A change requires another `form.FORMAT`.
WINDOW_ALIGNMENT_TOKENS = 128

# `FormSection.axis`, `FormSection.total`, `FormSection.element_tokens`, and the field.
_StoredField: TypeAlias = tuple[str, int, int, SectionField]

# The properties of a layer's cache that are the same on all ranks.
_StoredLayer: TypeAlias = tuple[Attention, tuple[_StoredField, ...]]


def canonical_form_of(ranks: Sequence[RankGeometry], chunk_tokens: int) -> CanonicalForm:
    """Return the canonical form of the chunks that an engine stores.

    Example: two engines serve a model of 2 KV heads, at TP 4 (each head is on two ranks) and at TP 2:

    >>> from kvferry.tools.models.layout import EngineShape, lay_out
    >>> from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
    >>> fields = tuple(StoredField(name, 2, 2, (("content", 128),)) for name in ("k", "v"))
    >>> model = ModelCache("gqa", (LayerCache(GroupKind.FULL, 0, fields),) * 4)
    >>> tp4 = canonical_form_of(lay_out(model, EngineShape(4, (2, 2), 128, "LBHNC", 10)), 256)
    >>> tp2 = canonical_form_of(lay_out(model, EngineShape(2, (4,), 16, "BLNHC", 10)), 256)
    >>> tp4 == tp2, tp4.content == tp2.content
    (True, True)
    >>> [(s.axis, s.units, s.unit_bytes) for s in tp2.groups[0].sections]   # 4 layers, 256 tokens, K and V
    [('head', 2, 524288)]

    Raise GeometryError if a rank is missing, ranks describe a layer differently, or one has no such form.
    """
    if chunk_tokens < 1:
        raise GeometryError(f"chunks of {chunk_tokens} tokens; expected 1 or more")
    _check_complete(ranks)
    stored: dict[str, _StoredLayer] = {}
    for group in (group for rank in ranks for group in rank.groups):
        for layer in group.layers:
            found = Attention(group.kind, group.attention_span), _stored_fields(layer)
            if stored.setdefault(layer.identity, found) != found:
                raise GeometryError(
                    f"layer {layer.name!r}: ranks of one engine describe it differently, "
                    f"{found} and {stored[layer.identity]}"
                )
    kinds = sorted({attention for attention, _ in stored.values()}, key=group_label)
    return CanonicalForm(chunk_tokens, tuple(_group(kind, stored, chunk_tokens) for kind in kinds))


def _check_complete(ranks: Sequence[RankGeometry]) -> None:
    have = sorted((rank.pp_rank, rank.tp_rank) for rank in ranks)
    sizes = {(rank.pp_size, rank.tp_size) for rank in ranks}
    if len(sizes) == 1:
        (pp, tp) = sizes.pop()
        if have == [(stage, rank) for stage in range(pp) for rank in range(tp)]:
            return
    raise GeometryError(f"the canonical form needs every rank of one engine once, these are {have}")


def _stored_fields(layer: Layer) -> tuple[_StoredField, ...]:
    if any(len(scale.factors) > 1 for scale in layer.scales):
        raise GeometryError(
            f"layer {layer.name!r}: its quantised cache has a scale per head, which the canonical form "
            "cannot hold; it can be handed over to an engine of equal scales, but not be stored"
        )
    found = [_sharded(layer, field) for field in layer.page.fields]
    # The largest elements come first, so that every field in a chunk is aligned.
    found.sort(key=lambda one: (-one[-1].item_bytes, one[-1].field))
    return tuple(found)


def _sharded(layer: Layer, field: Field) -> _StoredField:
    axis = next((axis for axis in map(field.axis, SHARDED) if axis is not None), None)
    name, total = (axis.name, axis.total) if axis else ("", 1)
    if others := [other for other, _, _ in field.held if other != name]:
        raise GeometryError(
            f"layer {layer.name!r}: field {field.name!r} is sharded along {others[0]!r}; "
            f"the canonical form knows {', '.join(SHARDED)}"
        )
    inner = tuple((one.name, one.count) for one in field.axes if one.name not in (TOKEN, name))
    part = SectionField(layer.identity, field.name, field.item_bytes, inner, layer.scales)
    return name, total, layer.page.element_tokens(field) or 1, part


def _group(attention: Attention, stored: dict[str, _StoredLayer], chunk_tokens: int) -> CanonicalGroup:
    sections: dict[tuple[str, int, int], list[SectionField]] = {}
    for layer in sorted(stored, key=_by_number):
        its_attention, fields = stored[layer]
        if its_attention == attention:
            for axis, total, each, part in fields:
                sections.setdefault((axis, total, each), []).append(part)
    tokens = 0 if attention.kind is GroupKind.STATE else chunk_tokens
    if split := [each for _, _, each in sections if tokens % each]:
        raise GeometryError(
            f"chunks of {chunk_tokens} tokens of {group_label(attention)}; expected a multiple of "
            f"{lcm(*split)}, because its pages have one value per as many tokens"
        )
    found = [
        FormSection(axis, total, tokens, tuple(parts), each)
        for (axis, total, each), parts in sections.items()
    ]
    return CanonicalGroup(attention.kind, attention.attention_span, tuple(sorted(found, key=_by_element)))


def _by_number(name: str) -> tuple[tuple[int, int, str], ...]:
    # Numbers are compared by value: layers.9 comes before layers.10.
    words: Iterable[str] = re.split(r"(\d+)", name)
    return tuple((0, int(word), word) if word.isdecimal() else (1, 0, word) for word in words)


def _by_element(section: FormSection) -> tuple[int, str, int, int]:
    # The largest elements come first, so that every field in a chunk is aligned.
    largest = max(part.item_bytes for part in section.parts)
    return -largest, section.axis, section.total, section.element_tokens


def whole_block_tokens(ranks: Sequence[RankGeometry]) -> int:
    """Return the number of tokens of which a chunk must hold a multiple, so that it ends where blocks end.

    It is the least common multiple of the tokens per block of all groups with sliding windows, and per
    element of all fields; 1 without either.
    """
    groups = [group for rank in ranks for group in rank.groups if group.kind is not GroupKind.STATE]
    # A load of a window would fill only a part of its last block, and other prompts could not share it.
    windows = (group.block_tokens for group in groups if group.attention_span)
    pages = {layer.page for group in groups for layer in group.layers}
    return lcm(*windows, *(page.element_tokens(field) for page in pages for field in page.fields))


def chunk_length(asked: int | None, interval: int, block: int = 1) -> int:
    """Return the configured number of tokens per chunk, or a default, for this `snapshot_interval`.

    >>> chunk_length(None, 1), chunk_length(None, 1056), chunk_length(64, 1056)
    (256, 176, 64)
    >>> chunk_length(None, 1, 48), chunk_length(None, 256, 128), chunk_length(None, 544, 544)
    (240, 256, 544)

    `interval` is 1 without snapshots. `block` is `whole_block_tokens`.
    """
    if asked:
        return asked
    # A chunk ends at a block's end, and a snapshot at a chunk's end.
    fits = [n for n in range(block, CHUNK_TOKENS + 1, block) if interval == 1 or interval % n == 0]
    return max(fits, default=block if interval == 1 else lcm(interval, block) if interval % block else block)


def content_alignment(group: GroupPattern, chunk_tokens: int) -> int:
    """Return the alignment, in tokens, of the position at which valid content begins in a stored chunk.

    It begins at the first position to which the token after the chunk attends, rounded down to a multiple.
    """
    # The engine may have freed KV outside of a short window when the chunk was stored. A window of at least a
    # chunk's length reaches back to the chunk's first token.
    whole = not group.attention_span or (
        group.kind is GroupKind.SLIDING and group.attention_span >= chunk_tokens
    )
    return chunk_tokens if whole else WINDOW_ALIGNMENT_TOKENS


def check_prompt_length(chunk_tokens: int, interval: int, longest: int) -> None:
    """Raise a ConfigError if a prompt of the maximum length (``max_model_len``) has no prefix to load."""
    if (first := first_prefix(chunk_tokens, interval)) > longest:
        snapshots = f" and snapshots every {interval}, of which the first at a chunk's end is at {first}"
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens{snapshots if interval > 1 else ''}, but max_model_len "
            f"is {longest}: no chunk could ever be loaded; {_suggest_chunk_tokens(interval, longest)}"
        )


def late_prefix(chunk_tokens: int, interval: int) -> str:
    """Return a sentence if chunks and snapshots end together only after several of both; empty otherwise.

    >>> late_prefix(176, 1056), late_prefix(256, 1056).partition(",")[0]
    ('', 'chunks of 256 tokens and snapshots every 1056 tokens first end together at 8448 tokens')
    """
    first = first_prefix(chunk_tokens, interval)
    if first == max(chunk_tokens, interval):
        return ""
    return (
        f"chunks of {chunk_tokens} tokens and snapshots every {interval} tokens first end together at "
        f"{first} tokens, so nothing of a shorter prompt is loaded; leave chunk_tokens out, or set it to a "
        f"divisor of {interval}, such as {divisor(interval, CHUNK_TOKENS)}"
    )


def check_blocks(chunk_tokens: int, block: int) -> None:
    """Raise a ConfigError if a chunk ends inside a block that it must hold whole (`whole_block_tokens`)."""
    if chunk_tokens % block:
        raise ConfigError(
            f"tiers: chunks of {chunk_tokens} tokens end inside this engine's blocks of {block} tokens, "
            f"which must be stored whole (windows, or pages of unknown content); set chunk_tokens to "
            f"{-(-chunk_tokens // block) * block}"
        )


def snapshot_interval(*blocks: int) -> int:
    """Return the least tokens between snapshots of all state groups, whose blocks have these tokens."""
    return lcm(*blocks)


def first_prefix(chunk_tokens: int, interval: int) -> int:
    """Return the length in tokens of the shortest prefix of a prompt that can be loaded.

    >>> first_prefix(256, 1), first_prefix(176, 1056), first_prefix(256, 1056)
    (256, 1056, 8448)
    """
    return lcm(chunk_tokens, interval)


def divisor(interval: int, limit: int) -> int:
    """Return the largest divisor of `interval` that is at most `limit`; `limit` for 1, without snapshots.

    >>> divisor(1, 256), divisor(1056, 256), divisor(128, 256)
    (256, 176, 128)
    """
    if interval == 1:
        return limit
    return max(n for n in range(1, limit + 1) if interval % n == 0)


def _suggest_chunk_tokens(interval: int, longest: int) -> str:
    if interval > longest:
        return f"a prompt never reaches its first snapshot; raise max_model_len above {interval}"
    if interval == 1:
        return f"set chunk_tokens to {longest} or less"
    return f"set chunk_tokens to a divisor of {interval}, {divisor(interval, CHUNK_TOKENS)} for instance"
