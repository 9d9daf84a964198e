"""Made-up engines with memory under them: geometry at addresses where there are bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvferry.geometry import GroupKind, RankGeometry, Region
from support.engines import EngineSpec
from support.oracle import Memory


def place(rank: RankGeometry, seed: int) -> tuple[RankGeometry, Memory]:
    """The same geometry at real addresses, and the bytes there: noise."""
    (region,) = rank.regions
    memory = Memory.of(rank, seed)
    memory.address = int(memory.bytes.ctypes.data)
    shift = memory.address - region.address
    groups = tuple(
        replace(group, layers=tuple(replace(layer, address=layer.address + shift) for layer in group.layers))
        for group in rank.groups
    )
    return replace(rank, groups=groups, regions=(Region(memory.address, region.length),)), memory


def scattered_tables(spec: EngineSpec, tokens: int, seed: int) -> tuple[np.ndarray, ...]:
    """Block tables for so many tokens: ids of one pool in no order, none twice."""
    ids = 1 + np.random.default_rng(seed).permutation(spec.num_blocks - 1)
    tables = []
    for group in spec.groups:
        count = 1 if group.kind is GroupKind.STATE else -(-tokens // group.block_tokens)
        assert count <= len(ids), f"a pool of {spec.num_blocks} blocks is too small"
        tables.append(ids[:count].astype(np.int64))
        ids = ids[count:]
    return tuple(tables)
