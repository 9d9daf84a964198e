"""Cache tensors that vLLM has bound to its layers: the memory that the engine computes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch

from kvferry.geometry.tensor_memory import Computed, TensorMemory

_ATTRIBUTE = "kv_cache"
"""Attribute of a layer that vLLM's `bind_kv_cache` sets: a tensor, or a tuple of the tensors of its states.

Every forward pass reads it again.
"""
_read_attribute = itemgetter(_ATTRIBUTE)


def memory_of(tensor: torch.Tensor) -> TensorMemory:
    """Return the memory of a cache tensor, whose first axis counts blocks."""
    item, storage = tensor.element_size(), tensor.untyped_storage()
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


class BoundCaches:
    """Cache tensors that are bound to layers of an engine now, and a cheap comparison with later ones.

    It keeps the tensors alive, so no other tensor can get their addresses.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        """Remember the tensors that are bound to layers.

        Args:
            layers: layer objects of the engine, by name.
        """
        self._names, self._attributes = list(layers), [vars(layer) for layer in layers.values()]
        self.remember()

    def remember(self) -> None:
        """Remember the tensors that are bound now in place of those before."""
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


def _tensors(bound: Any) -> Sequence[torch.Tensor]:
    return (bound,) if isinstance(bound, torch.Tensor) else tuple(bound)
