"""Paged K and V of a model: one tensor per layer, which transformers reads and writes, and kvferry moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.geometry import Axis, Field, Group, GroupKind, Layer, PageFormat, RankGeometry, Region

KINDS = {"full_attention": GroupKind.FULL, "sliding_attention": GroupKind.SLIDING}


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Paged KV cache of a model: one tensor per layer.

    Attributes:
        layers: tensor of each layer with K and V, float32 of shape (blocks, 2, heads, tokens per block,
            head_dim). Block 0 is the null block, which stays zero.
        groups: indices of the layers that share a block table, for each kind of layer.
        geometry: description of this memory for kvferry.
    """

    layers: list[torch.Tensor]
    groups: list[list[int]]
    geometry: RankGeometry

    @classmethod
    def allocate(cls, config: Any, num_blocks: int, block_tokens: int) -> Pages:
        """Allocate the paged KV cache of a model, filled with zeros.

        Layers of the same kind (full or sliding-window attention) form a KV cache group.

        Args:
            config: transformers' configuration of the model.
            num_blocks: number of blocks of each layer, the null block included.
            block_tokens: number of tokens per block.
        """
        heads, width = config.num_key_value_heads, config.head_dim
        shape = num_blocks, 2, heads, block_tokens, width
        layers = [torch.zeros(shape, dtype=torch.float32) for _ in range(config.num_hidden_layers)]
        kinds = list(dict.fromkeys(config.layer_types))
        groups = [[n for n, kind in enumerate(config.layer_types) if kind == each] for each in kinds]
        geometry = RankGeometry(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            num_blocks=num_blocks,
            groups=tuple(
                Group(
                    KINDS[kind],
                    block_tokens,
                    config.sliding_window if KINDS[kind] is GroupKind.SLIDING else 0,
                    tuple(_layer(number, layers[number]) for number in numbers),
                )
                for kind, numbers in zip(kinds, groups, strict=True)
            ),
            regions=tuple(Region(layer.data_ptr(), layer.nbytes) for layer in layers),
        )
        geometry.check()
        return cls(layers, groups, geometry)

    def cache(self, tables: Sequence[Sequence[int]], computed: int) -> Cache:
        """Return a view of a request's blocks as the transformers `Cache` of one forward pass.

        Args:
            tables: block ids by position, for each KV cache group. The blocks must have room for all tokens
                of the pass.
            computed: number of tokens whose K and V are in the blocks.
        """
        table_of = {n: ids for numbers, ids in zip(self.groups, tables, strict=True) for n in numbers}
        return Cache(
            [PagedLayer(layer, torch.tensor(table_of[n]), computed) for n, layer in enumerate(self.layers)]
        )


class PagedLayer(CacheLayerMixin):
    """View of one request's K and V in one layer, which transformers uses as the cache of a forward pass."""

    def __init__(self, pages: torch.Tensor, table: torch.Tensor, computed: int) -> None:
        """Create a view of a request's blocks in one layer.

        Args:
            pages: tensor of the layer, of shape (blocks, 2, heads, tokens per block, head_dim).
            table: block ids of the request by position, int64.
            computed: number of tokens whose K and V are in the blocks.
        """
        super().__init__()
        self._pages, self._table, self._computed = pages, table, computed

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write K and V of the pass's tokens to the blocks, and return K and V of all tokens.

        K and V of tokens that have left a sliding window may be zero. The attention mask hides these tokens.

        Args:
            key_states, value_states: K and V of the pass, each of shape (1, heads, tokens, head_dim).

        Returns:
            K and V of all tokens of the request, each of shape (1, heads, tokens, head_dim).
        """
        size, total = self._pages.shape[3], self._computed + key_states.shape[2]
        at = torch.arange(self._computed, total)
        new = torch.stack((key_states[0], value_states[0]))  # (2, heads, tokens, head_dim)
        self._pages[self._table[at // size], :, :, at % size] = new.permute(2, 0, 1, 3)
        every = torch.arange(total)
        found = self._pages[self._table[every // size], :, :, every % size].permute(1, 2, 0, 3)
        return found[:1], found[1:]

    def get_seq_length(self) -> int:
        """Return the number of the request's tokens before the forward pass."""
        return self._computed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens that the attention mask covers, and the position of the first one."""
        return self._computed + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which means no limit: only the request's blocks limit the length."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the tensor of the layer is already allocated."""


def _layer(number: int, pages: torch.Tensor) -> Layer:
    """Describe a layer's tensor to kvferry, under the name that the layer has in vLLM.

    Peers match layers by name.

    Args:
        number: index of the layer.
        pages: tensor of the layer, of shape (blocks, 2, heads, tokens per block, head_dim).
    """
    _, _, heads, tokens, width = pages.shape
    item = pages.element_size()
    axes = (
        Axis("head", ((heads, tokens * width * item),)),
        Axis("token", ((tokens, width * item),)),
        Axis("content", ((width, item),)),
    )
    plane = heads * tokens * width * item
    fields = Field("k", item, 0, axes), Field("v", item, plane, axes)
    page = PageFormat("transformers example", tokens, 2 * plane, fields)
    return Layer(f"model.layers.{number}.self_attn.attn", pages.data_ptr(), 2 * plane, page)
