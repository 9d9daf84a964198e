"""Marks tell whether the right pages arrived."""

from __future__ import annotations

import numpy as np
import pytest
from kvferry.bench.pool import Pool
from kvferry.bench.shapes import Shape

from kvferry.errors import TransferError

SHAPE = Shape("tiny", layers=3, kv_heads=2, head_dim=8)
SRC, DST = np.array([2, 4, 1]), np.array([3, 1, 4])


def _pages(pool: Pool) -> np.ndarray:
    return pool.bytes.reshape(SHAPE.layers, -1, SHAPE.page_bytes)


@pytest.fixture
def moved() -> Pool:
    """A pool whose blocks DST hold blocks SRC of a marked pool."""
    theirs, ours = Pool(SHAPE, 5), Pool(SHAPE, 5)
    theirs.mark()
    ours.wipe()
    _pages(ours)[:, DST] = _pages(theirs)[:, SRC]
    return ours


def test_the_right_pages_pass(moved: Pool) -> None:
    moved.check(SRC, DST)


def test_pages_of_other_blocks_are_noticed(moved: Pool) -> None:
    with pytest.raises(TransferError, match="6 of 9 pages"):
        moved.check(SRC, DST[[1, 0, 2]])


def test_one_page_cut_short_is_noticed(moved: Pool) -> None:
    _pages(moved)[1, DST[0], -8:] = 0
    with pytest.raises(TransferError, match="1 of 9 pages"):
        moved.check(SRC, DST)


def test_wiped_pages_are_noticed(moved: Pool) -> None:
    moved.wipe()
    with pytest.raises(TransferError, match="9 of 9 pages"):
        moved.check(SRC, DST)
