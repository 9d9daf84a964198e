"""Guard of an engine's own KV cache: what is registered for transfers is what the engine computes in.

A KV cache may move while an engine runs: vLLM may bind other tensors to its layers, or register caches again.
Transfers and stores would go on in the old memory, and answers would be wrong without any error. So a worker
compares both when it registers the cache, and again in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvferry.engines.vllm.compat.bound_caches import BoundCaches, memory_of
from kvferry.engines.vllm.compat.layers import attention_layer
from kvferry.errors import ConfigError
from kvferry.geometry import RankGeometry
from kvferry.geometry.tensor_memory import Computed, TensorMemory, find_difference, find_unregistered


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
            vllm_config: the engine's configuration.
            geometry: pages and regions as they will be registered.
            registered: tensor of each layer that `geometry` describes; those of the host buffer if there is
                one.
            handed: tensor of each layer, as the engine handed it over.

        Raises:
            ConfigError: other memory would be registered than the engine computes in.
        """
        names = [layer.name for group in geometry.groups for layer in group.layers]
        self._handed = {name: memory_of(handed[name]) for name in names}
        self._bound = BoundCaches({name: attention_layer(vllm_config, name) for name in names})
        self._computed = self._bound.memory()
        found = find_unregistered(geometry, {name: memory_of(registered[name]) for name in names})
        if not found:
            found = _first_difference(self._handed, self._computed)
        if found:
            raise ConfigError(
                f"{found}; transfers would use other memory than the engine: run it without kvferry, and "
                "report this with the version of vLLM"
            )

    def find_move(self, *, thorough: bool) -> str:
        """Return how the memory has changed since it was registered; empty if it has not.

        Args:
            thorough: True to find also tensors whose strides or memory were changed in place; False to
                compare only the tensor objects of the layers.
        """
        if self._bound.are_bound() and not (thorough and not self._bound.are_in_place()):
            return ""
        computed = self._bound.memory()
        for name, now in computed.items():
            if now != (before := self._computed[name]):
                return f"layer {name}: the layer computes in {_text(now)}; expected {_text(before)}"
        self._bound.remember()  # other views of the same memory
        return ""

    def find_other(self, handed: Mapping[str, torch.Tensor]) -> str:
        """Return how caches that vLLM hands over again differ from the registered ones; empty if they do not.

        Args:
            handed: tensor of each layer, by layer name.
        """
        for name, before in self._handed.items():
            if name not in handed:
                return f"layer {name}: vLLM handed over no cache for it; expected {before}"
            if (now := memory_of(handed[name])) != before:
                return f"layer {name}: vLLM handed over {now}; expected {before}"
        return self.find_move(thorough=True)


def _first_difference(handed: Mapping[str, TensorMemory], computed: Mapping[str, Computed]) -> str:
    for name, memory in handed.items():
        if difference := find_difference(memory, computed[name]):
            return f"layer {name}: {difference}"
    return ""


def _text(memory: Computed) -> str:
    return str(memory) if isinstance(memory, TensorMemory) else " and ".join(map(str, memory)) or "no tensor"
