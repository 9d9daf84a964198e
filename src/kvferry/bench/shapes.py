"""A model's KV cache as a geometry: dense attention, one layer's pages side by side (LBHNC).

The interior of a page is heads, tokens, then K and V of one head and token packed together. A homogeneous
transfer never looks inside: a page is one descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import ConfigError
from kvferry.geometry import Axis, Field, Group, GroupKind, Layer, PageFormat, RankGeometry, Region
from kvferry.planning.pieces import Int64s

ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the size of a dense model's KV cache.

    Attributes:
        name: for people.
        layers, kv_heads, head_dim: the model's.
        block_tokens: tokens of a block.
        dtype_bytes: bytes of an element.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = 16
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        sizes = (self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.dtype_bytes)
        if min(sizes) < 1:
            raise ConfigError(
                f"geometry {self.name}: layers, KV heads, head size, block size and element bytes are "
                f"{sizes}; each must be at least 1"
            )
        if self.page_bytes % 16:
            raise ConfigError(
                f"geometry {self.name}: a page has {self.page_bytes} bytes; both ends of each are marked "
                "with 8 bytes, so choose sizes that make it a multiple of 16"
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_tokens * self.kv_heads * 2 * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.page_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def with_small_pages(self) -> Shape:
        """As many layers and tokens per block, in pages as small as can be marked."""
        return replace(self, name=f"{self.name}, small pages", kv_heads=1, head_dim=8)

    def geometry(self, address: int, num_blocks: int) -> RankGeometry:
        """One rank with `num_blocks` blocks from `address` on, layer after layer."""
        layer_bytes = num_blocks * self.page_bytes
        page = self._page()
        layers = tuple(
            Layer(f"layers.{n}", address + n * layer_bytes, self.page_bytes, page) for n in range(self.layers)
        )
        group = Group(GroupKind.FULL, self.block_tokens, 0, layers)
        return RankGeometry(0, 1, 0, 1, num_blocks, (group,), (Region(address, self.layers * layer_bytes),))

    def _page(self) -> PageFormat:
        item = self.dtype_bytes
        token = 2 * self.head_dim * item
        axes = (
            Axis("head", ((self.kv_heads, self.block_tokens * token),)),
            Axis("token", ((self.block_tokens, token),)),
            Axis("content", ((2 * self.head_dim, item),)),
        )
        return PageFormat("bench", self.block_tokens, self.page_bytes, (Field("kv", item, 0, axes),))


SHAPES = {shape.name: shape for shape in (Shape("llama-3.1-8b", 32, 8, 128), Shape("qwen3-0.6b", 28, 8, 128))}


def block_table(blocks: int, order: str, seed: int) -> Int64s:
    """Ids of `blocks` blocks by position, int64, none of them the null block.

    Args:
        blocks: how many; the pool has one more.
        order: "scattered" as in an engine that has run for a while, or "contiguous" as in a fresh one.
        seed: which scattering.
    """
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    return np.random.default_rng(seed).permutation(ids) if order == "scattered" else ids
