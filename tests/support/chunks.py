"""Chunks in canonical form, without the planner: what their bytes are, and engines to store and load them."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from support.engines import LAYOUTS, SCATTERED, EngineSpec, Family, GroupSpec, Stored, layer_name
from support.oracle import _hash
from support.strategies import (
    _span,
    _tables,
    attention_fields,
    interiors,
    shared_tokens,
    sharing,
    stages,
    state_fields as snapshot_fields,
    token_kinds,
)


@dataclass(frozen=True)
class Finest:
    """How axes are cut into units: one per element up to a length, else what they share with a number."""

    every_element: int = 256
    finest: int = 960

    def units(self, total: int) -> int:
        return total if total <= self.every_element else gcd(total, self.finest)


@dataclass(frozen=True)
class StoredLayout:
    """Where an engine keeps one sequence: its layout, and a block table for each of its groups."""

    spec: EngineSpec
    tables: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Kept:
    """Chunks that two engines store between them and a third loads.

    Attributes:
        families: what every layer keeps.
        chunk_tokens, chunks: the sequence.
        cut: chunks that the first engine stores; the second stores the others.
        writers: both of them.
        reader: the third.
        spans: what the reader needs, by its groups.
        seed: of the order of slots.
    """

    families: tuple[Family, ...]
    finest: Finest
    chunk_tokens: int
    chunks: int
    cut: int
    writers: tuple[StoredLayout, StoredLayout]
    reader: StoredLayout
    spans: tuple[LoadSpan, ...]
    seed: int


def chunk_of(
    families: Sequence[Family], kind: GroupKind, attention_span: int, tokens: range, finest: Finest
) -> np.ndarray:
    """The bytes of one chunk, uint8; `tokens` is ignored for a snapshot."""
    positions = np.zeros(1, np.int64) if kind is GroupKind.STATE else np.array(tokens)
    sections: dict[int, list[np.ndarray]] = defaultdict(list)
    items: dict[int, int] = defaultdict(int)
    for number, family in enumerate(families):
        if (family.kind, family.attention_span) != (kind, attention_span):
            continue
        fields: dict[int, list[np.ndarray]] = defaultdict(list)
        for stored in sorted(family.fields, key=lambda f: (-f.item_bytes, f.name)):
            units = finest.units(stored.heads or 1)
            value = _values(layer_name(number), stored, positions).reshape(
                units, -1, len(positions), stored.run
            )
            fields[stored.heads].append(value.swapaxes(1, 2).reshape(units, len(positions), -1))
            items[stored.heads] = max(items[stored.heads], stored.item_bytes)
        for heads, parts in fields.items():
            together = np.concatenate(parts, axis=2)
            sections[heads].append(together.reshape(len(together), -1))
    order = sorted(sections, key=lambda heads: (-items[heads], bool(heads), heads))
    return np.concatenate([np.concatenate(sections[heads], axis=1).reshape(-1) for heads in order])


def _values(layer: str, stored: Stored, positions: np.ndarray) -> np.ndarray:
    """What the oracle puts at every coordinate: uint8 of shape (heads, tokens, *inner, item_bytes)."""
    inner = [count for _, count in stored.inner]
    index = np.indices([stored.heads or 1, len(positions), *inner], np.int64)
    coordinates = {name: index[2 + i] for i, (name, _) in enumerate(stored.inner)}
    if stored.heads:
        coordinates["head"] = index[0]
    value = _hash(np.zeros(index.shape[1:], np.uint64), zlib.crc32(f"{layer} {stored.name}".encode()))
    value = _hash(value, positions[index[1]])
    for name in sorted(coordinates):
        value = _hash(value, coordinates[name])
    return (_hash(value[..., None], np.arange(stored.item_bytes)) >> np.uint64(40)).astype(np.uint8)


@contextmanager
def cut_like(finest: Finest) -> Iterator[None]:
    """Units of several elements, though the axes of made-up models are short."""
    form = "kvferry.geometry.canonical.form"
    with patch(f"{form}.EVERY_ELEMENT", finest.every_element), patch(f"{form}.FINEST", finest.finest):
        yield


@st.composite
def kept(draw: st.DrawFn) -> Kept:
    """Any three engines of any model that has a canonical form."""
    one_shape = draw(st.booleans())
    if one_shape:
        fields = draw(attention_fields())
        kinds = tuple(draw(st.lists(token_kinds(fields), min_size=1, max_size=3)))
    else:
        kinds = tuple(draw(st.lists(st.one_of(_tokens(), _tokens(), _snapshots()), min_size=1, max_size=3)))
    of_layer = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=5))
    families = tuple(kinds[n] for n in of_layer)
    chunk_tokens, chunks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    total = chunk_tokens * chunks
    prompt = total + draw(st.sampled_from((0, 0, 1, 5)))
    finest = draw(st.sampled_from((Finest(), Finest(), Finest(1, 2), Finest(2, 3))))
    layouts = LAYOUTS if one_shape else [name for name in LAYOUTS if name not in SCATTERED]
    engines = []
    for number, tokens in enumerate((total, total, prompt)):
        layout = draw(st.sampled_from(layouts))
        groups = draw(_groups(families, one_size=layout in SCATTERED))
        groups = draw(shared_tokens(families, tuple(range(len(families))), groups))
        shuffle = random.Random(draw(st.integers(0, 99)))
        tables, blocks = _tables(groups, [set()] * len(groups), tokens, draw(st.integers(0, 2)), shuffle)
        (tp, pcp), split = draw(sharing(families, groups)), draw(stages(len(families)))
        address = 1 + number << 44
        spec = EngineSpec(tp, split, groups, layout, draw(interiors()), blocks, address, pcp)
        engines.append(StoredLayout(spec, tables))
    first, second, reader = engines
    spans = tuple(
        _span(draw(st.sampled_from((0, 0, 1, 3, 99))), group, total, prompt) for group in reader.spec.groups
    )
    cut = draw(st.integers(0, chunks))
    seed = draw(st.integers(0, 99))
    return Kept(families, finest, chunk_tokens, chunks, cut, (first, second), reader, spans, seed)


@st.composite
def _tokens(draw: st.DrawFn) -> Family:
    return draw(token_kinds(draw(attention_fields())))


@st.composite
def _snapshots(draw: st.DrawFn) -> Family:
    return Family(GroupKind.STATE, fields=draw(snapshot_fields()))


@st.composite
def _groups(draw: st.DrawFn, families: Sequence[Family], one_size: bool) -> tuple[GroupSpec, ...]:
    """Layers that need the same dealt out to groups in any way, of any block size."""
    alike: dict[tuple[GroupKind, int], list[int]] = defaultdict(list)
    for number, family in enumerate(families):
        alike[family.kind, family.attention_span].append(number)
    size = st.tuples(st.integers(1, 8), st.integers(1, 3))
    same = draw(size)
    groups = []
    for (kind, attention_span), numbers in alike.items():
        turns = draw(st.integers(1, min(2, len(numbers))))
        for turn in range(turns):
            tokens, kernels = same if one_size else draw(size)
            groups.append(GroupSpec(kind, attention_span, tuple(numbers[turn::turns]), tokens, kernels))
    return tuple(draw(st.permutations(groups)))
