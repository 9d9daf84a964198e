"""An engine of few large blocks: reading them all takes long enough to interfere."""

from __future__ import annotations

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.planning.select import LoadSpan
from support.engines import EngineSpec, Family, GroupSpec, Interior, ranks
from support.oracle import Memory

PAGE = 1 << 18
BLOCKS = 128
FAMILIES = (Family(GroupKind.FULL, opaque_bytes=PAGE),)
SPEC = EngineSpec(1, (1,), (GroupSpec(GroupKind.FULL, 0, (0,), 16),), "LBHNC", Interior(), BLOCKS + 1)
SPAN = LoadSpan(0, BLOCKS * 16, BLOCKS * 16)
FORWARD = (np.arange(1, BLOCKS + 1, dtype=np.int64),)
BACKWARD = (np.arange(BLOCKS, 0, -1, dtype=np.int64),)
(RANK,) = ranks(SPEC, FAMILIES)


def span(blocks: int) -> LoadSpan:
    """So many blocks from the start."""
    return LoadSpan(0, blocks * 16, blocks * 16)


def pages(seed_or_bytes: int | np.ndarray) -> np.ndarray:
    """Pages by block id, uint8 of shape (blocks, PAGE): of a memory, or of a producer made with that seed."""
    found = Memory.of(RANK, seed_or_bytes).bytes if isinstance(seed_or_bytes, int) else seed_or_bytes
    return found.reshape(BLOCKS + 1, PAGE)
