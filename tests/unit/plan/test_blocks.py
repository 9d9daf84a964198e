"""Tokens of a block and groups of layers, on examples small enough to count by hand.

`tests/unit/engines/test_model_built.py` compares those of the table's models with vLLM's own.
"""

from __future__ import annotations

import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.tools.models.store import LayerCache, StoredField
from kvferry.tools.plan.blocks import base_tokens, block_sizes, group_counts
from support.models import attention

WIDE = attention(heads=4, kind=GroupKind.SLIDING, attention_span=8)
NARROW = attention(heads=1)
LAYERS = [WIDE] * 10 + [NARROW] * 2


def test_layers_that_keep_less_get_larger_blocks_until_ranks_keep_as_much_of_them():
    sizes, why = block_sizes(LAYERS, 1, "LBNHC", 16)
    assert sizes == {WIDE: 16, NARROW: 64}
    assert why.startswith("blocks of 64 tokens at TP1 in layers that keep less per token")
    assert block_sizes(LAYERS, 2, "LBNHC", 16)[0] == {WIDE: 16, NARROW: 32}
    assert block_sizes(LAYERS, 4, "LBNHC", 16) == ({WIDE: 16, NARROW: 16}, "")


def test_a_page_that_does_not_divide_the_largest_keeps_its_tokens():
    odd = attention(heads=3)
    assert block_sizes([WIDE, odd], 1, "LBNHC", 16) == ({WIDE: 16, odd: 16}, "")


def test_layers_under_one_block_table_keep_their_tokens():
    other = attention(heads=4)
    assert block_sizes([other, NARROW], 1, "LBNHC", 16) == ({other: 16, NARROW: 16}, "")
    assert group_counts([other] * 9 + [NARROW], 1, "LBNHC", {other: 16, NARROW: 16}) == {other: 1, NARROW: 1}


def test_windows_fill_the_block_of_other_layers_if_blocks_are_outermost():
    """Two narrow layers are half a wide page: a block has one wide page; of 16 narrow ones it has four."""
    sizes = {WIDE: 16, NARROW: 16}
    assert block_sizes(LAYERS, 1, "BLHNC", 16) == (sizes, "")
    assert group_counts(LAYERS, 1, "BLHNC", sizes) == {WIDE: 10, NARROW: 1}
    assert group_counts([WIDE] * 10 + [NARROW] * 16, 1, "BLHNC", sizes) == {WIDE: 3, NARROW: 1}
    # On four ranks all pages are equal, and groups have as many layers as the rarest kind.
    assert group_counts(LAYERS, 4, "BLHNC", sizes) == {WIDE: 5, NARROW: 1}


def latent(name: str, width: int, **more: int) -> LayerCache:
    return LayerCache(GroupKind.MLA, 0, (StoredField(name, 2, 0, (("content", width),)),), **more)


def test_sparse_attention_has_the_blocks_of_its_kernels():
    indexer = latent("indexer", 66)
    assert base_tokens([latent("latent", 576), indexer], 1, None)[0] == 64
    assert base_tokens([attention(), indexer], 1, None)[0] == 128
    assert base_tokens([attention(), indexer], 1, 256) == (256, "")


def test_layers_that_decide_their_blocks_need_blocks_outermost():
    layers = [latent("latent", 576, block_tokens=64), latent("indexer", 66, block_tokens=256)]
    with pytest.raises(GeometryError, match=r"LBNHC has layers outside of blocks.*use BLHNC"):
        block_sizes(layers, 1, "LBNHC", 256)
    assert block_sizes(layers, 1, "BLHNC", 256)[0] == dict(zip(layers, (64, 256), strict=True))
