"""An engine's own KV cache: a guard of the memory that it computes in, and a copy in host memory.

A KV cache may move while an engine runs: vLLM may bind other tensors to its layers, or register caches again.
Transfers and stores would go on in the old memory, and answers would be wrong without any error. So a worker
compares both when it registers the cache, and again in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, Literal, TypeAlias

import torch

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.compat.model import attention_layer
from kvferry.geometry import Group, RankGeometry
from kvferry.geometry.tensor_memory import Computed, TensorMemory, find_difference, find_unregistered
from kvferry.planning.descriptors import Int64s

_ATTRIBUTE = "kv_cache"
"""Attribute of a layer that vLLM's `bind_kv_cache` sets: a tensor, or a tuple of the tensors of its states.

Every forward pass reads it again.
"""
_read_attribute = itemgetter(_ATTRIBUTE)

CopyBlocks: TypeAlias = Callable[
    [dict[str, torch.Tensor], dict[str, torch.Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
]


class CacheGuard:
    """Comparison of registered memory with the memory that the layers of an engine compute in."""

    def __init__(
        self,
        vllm_config: Any,
        geometry: RankGeometry,
        registered: Mapping[str, torch.Tensor],
        handed: Mapping[str, torch.Tensor],
    ) -> None:
        """Check the memory that is about to be registered, and remember where the engine computes.

        Args:
            geometry: pages and regions as they will be registered.
            registered: tensor of each layer that `geometry` describes, which may be in the host buffer.
            handed: tensor of each layer, as the engine handed it over.

        Raises:
            ConfigError: other memory would be registered than the engine computes in.
        """
        names = [layer.name for group in geometry.groups for layer in group.layers]
        self._handed = {name: memory_of(handed[name]) for name in names}
        self._bound = _BoundCaches({name: attention_layer(vllm_config, name) for name in names})
        self._computed = self._bound.memory()
        found = find_unregistered(geometry, {name: memory_of(registered[name]) for name in names})
        differences = (
            f"layer {name}: {difference}"
            for name, memory in self._handed.items()
            if (difference := find_difference(memory, self._computed[name]))
        )
        if found := found or next(differences, ""):
            raise ConfigError(
                f"{found}; transfers would use other memory than the engine: run it without kvferry, and "
                "report this with the version of vLLM"
            )

    def find_move(self, *, thorough: bool) -> str:
        """Return how the memory has changed since it was registered; empty if it has not.

        With `thorough`, find also tensors whose strides or memory were changed in place.
        """
        if self._bound.are_bound() and not (thorough and not self._bound.are_in_place()):
            return ""
        computed = self._bound.memory()
        for name, now in computed.items():
            if now != (before := self._computed[name]):
                return f"layer {name}: the layer computes in {_text(now)}; expected {_text(before)}"
        # Other tensor objects are harmless if they are views of the same memory.
        self._bound.remember()
        return ""

    def find_other(self, handed: Mapping[str, torch.Tensor]) -> str:
        """Return how caches that vLLM hands over again differ from the registered ones; empty if equal."""
        for name, before in self._handed.items():
            if name not in handed:
                return f"layer {name}: vLLM handed over no cache for it; expected {before}"
            if (now := memory_of(handed[name])) != before:
                return f"layer {name}: vLLM handed over {now}; expected {before}"
        return self.find_move(thorough=True)


class _BoundCaches:
    """Cache tensors that are bound to layers of an engine, and a cheap comparison with later ones."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._names, self._attributes = list(layers), [vars(layer) for layer in layers.values()]
        self.remember()

    def remember(self) -> None:
        """Remember the tensors that are bound now in place of those before."""
        # The references keep the tensors alive, so no other tensor can get their addresses.
        self._bound = self._read()
        self._tensors = [tensor for bound in self._bound for tensor in _tensors(bound)]
        self._places = self._read_places()

    def memory(self) -> dict[str, Computed]:
        """Return the memory that each layer computes in now, by layer name."""
        found = dict[str, Computed]()
        for name, bound in zip(self._names, self._read(), strict=True):
            memories = tuple(memory_of(tensor) for tensor in _tensors(bound))
            found[name] = memories[0] if isinstance(bound, torch.Tensor) else memories
        return found

    def are_bound(self) -> bool:
        """Return True if the layers still have the same tensor objects. Takes some 0.1 µs per layer."""
        try:
            # No loop of the interpreter: it would take three times as long.
            return all(map(is_, map(_read_attribute, self._attributes), self._bound))
        except KeyError:
            return False

    def are_in_place(self) -> bool:
        """Return True if the tensor objects still have their addresses and strides. Takes 1 µs per layer."""
        return self._read_places() == self._places

    def _read(self) -> list[Any]:
        return [attributes.get(_ATTRIBUTE, ()) for attributes in self._attributes]

    def _read_places(self) -> tuple[list[int], list[Any]]:
        return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(torch.Tensor.stride, self._tensors))


def memory_of(tensor: torch.Tensor) -> TensorMemory:
    """Return the memory of a cache tensor, whose first axis counts blocks."""
    item, storage = tensor.element_size(), tensor.untyped_storage()
    # A tensor without axes holds no blocks.
    blocks, *counts = tensor.shape or (0,)
    block_stride, *strides = (stride * item for stride in tensor.stride() or (0,))
    return TensorMemory(
        address=tensor.data_ptr(),
        blocks=blocks,
        block_stride=block_stride,
        axes=tuple(zip(counts, strides, strict=True)),
        item_bytes=item,
        storage=(storage.data_ptr(), storage.nbytes()),
    )


def _tensors(bound: Any) -> Sequence[torch.Tensor]:
    return (bound,) if isinstance(bound, torch.Tensor) else tuple(bound)


def _text(memory: Computed) -> str:
    return str(memory) if isinstance(memory, TensorMemory) else " and ".join(map(str, memory)) or "no tensor"


class HostBuffer:
    """Copy of a device's KV cache in host memory (`caches`, by layer), which peers read and write."""

    def __init__(self, device: Mapping[str, torch.Tensor], num_blocks: int, copy: CopyBlocks | None) -> None:
        """Allocate zeroed host memory of the size of the device's KV cache."""
        if copy is None:
            raise ConfigError(
                "vLLM handed over no copy operation for the host buffer; set host_buffer to false"
            )
        self._device = dict(device)
        self._blocks = num_blocks
        self._copy = copy
        self.caches = {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in device.items()}

    def save(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        self._copy_groups(groups, blocks, "d2h")

    def load(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        self._copy_groups(groups, blocks, "h2d")

    def _copy_groups(
        self, groups: Sequence[Group], blocks: Sequence[Int64s], direction: Literal["h2d", "d2h"]
    ) -> None:
        for group, ids in zip(groups, blocks, strict=True):
            names = [layer.name for layer in group.layers]
            # A group may have no layers in this stage of a pipeline.
            if not names or not len(ids):
                continue
            # vLLM's operation takes kernel blocks, of which a block may have several.
            ratio = self._device[names[0]].shape[0] // self._blocks
            kernel = [int(b) * ratio + i for b in ids for i in range(ratio)]
            host, device = ({name: of[name] for name in names} for of in (self.caches, self._device))
            source, target = (host, device) if direction == "h2d" else (device, host)
            self._copy(source, target, kernel, kernel, direction)
