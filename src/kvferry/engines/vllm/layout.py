"""Memory layout of an engine's KV cache: which layout to request, and which layout the cache really has.

A layout is an order of the axes layer, block, head, token and content (`L B H N C`), outermost first. kvferry
moves KV between any two layouts. But if the block axis is outermost, a READ of a block takes one descriptor
instead of one per layer and field. So the connector requests such a layout if the attention backends declare
support for it, and reads the actual layout back from the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.engines.vllm.compat.model import (
    attention_backends,
    declared_layouts,
    layers_are_alike,
    operators_layout,
    supported_layouts,
    takes_whole_blocks,
)
from kvferry.engines.vllm.content import ADAPTERS
from kvferry.geometry.rank import LAYOUTS, is_compact

_HEADS_OUTSIDE, _PAGES_WHOLE = "BHLNC", "BLHNC"
"""Preferred layouts: the first if all layers of the model are alike and pages move by fields, or the second.

In the first, any range of heads in a block is contiguous. But the bytes of a page are scattered over the
block, so a page of unknown content, which moves whole, would take many small copies.
"""

_Strided = Sequence[tuple[str, int, int]]
"""(axis, extent, stride in bytes) of each axis: L, B, H, N and C."""


def requested_layout(vllm_config: Any, config: ConnectorConfig) -> str | None:
    """Return the KV cache layout that the connector requests from vLLM; None to leave the choice to vLLM."""
    if config.layout == "engine" or vllm_config.model_config is None:
        return None
    if config.layout != "auto":
        return config.layout
    by_fields = all(name in ADAPTERS for name in attention_backends(vllm_config))
    best = _HEADS_OUTSIDE if by_fields and layers_are_alike(vllm_config) else _PAGES_WHOLE
    whole = takes_whole_blocks(vllm_config)
    return best if whole and best in declared_layouts(vllm_config) else None


def read_back(kv_cache_config: Any, caches: Mapping[str, Any]) -> str:
    """Return the name of the layout that the engine's cache tensors have; ``unknown`` if no layout fits.

    Args:
        caches: cache tensor of each layer, by layer name, of shape (blocks, heads, tokens, content).
    """
    fitting = [name for name in LAYOUTS if all(_fits(name, t) for t in _tensors(kv_cache_config, caches))]
    # Several layouts fit if axes have a single element. They are the same then, so take the name that users
    # know.
    named = str(kv_cache_config.kv_cache_layout)
    return named if named in fitting else " or ".join(fitting) or "unknown"


def check_forced(vllm_config: Any, config: ConnectorConfig, found: str) -> None:
    """Raise a ConfigError if the connector's settings require another layout than `found`."""
    if config.layout in ("auto", "engine", found):
        return
    # vLLM does not ask the connector if this variable is set.
    if operators := operators_layout():
        raise ConfigError(
            f"layout is {config.layout!r}, but VLLM_KV_CACHE_LAYOUT={operators} gave the cache layout "
            f"{found}; unset one of the two"
        )
    who, supported = "its attention backends", supported_layouts(vllm_config)
    if config.layout in supported:
        # vLLM drops a supported layout if pages of different shapes could not share slots in it.
        who, supported = "layers that are not all alike", [name for name in supported if is_compact(name)]
    raise ConfigError(
        f"layout is {config.layout!r}, but the engine's cache has {found}: {who} support "
        f"{', '.join(supported)}; set layout to one of these, or to 'auto'"
    )


def _tensors(kv_cache_config: Any, caches: Mapping[str, Any]) -> Iterable[_Strided]:
    """Yield the axes of each memory allocation of the KV cache."""
    for allocated in kv_cache_config.kv_cache_tensors:
        layers = [caches[name] for name in allocated.layers if name in caches]
        if not layers:
            continue
        first, item = layers[0], layers[0].element_size()
        # The layers of an allocation are evenly spaced.
        apart = layers[1].data_ptr() - first.data_ptr() if len(layers) > 1 else 0
        inner = zip("BHNC", first.shape, (stride * item for stride in first.stride()), strict=True)
        yield [("L", len(layers), apart), *inner]


def _fits(name: str, tensor: _Strided) -> bool:
    """Return True if a tensor's strides decrease in the order of the layout's axes."""
    # The stride of an axis of extent 1 says nothing.
    stride = {axis: distance for axis, extent, distance in tensor if extent > 1}
    return all(stride[outer] > stride[inner] for outer, inner in pairwise(a for a in name if a in stride))
