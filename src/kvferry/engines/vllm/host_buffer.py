"""Host memory that stands in for a device's cache where the device cannot be registered with the transport.

The buffer mirrors the cache block by block, so everything else sees a cache like any other. The producer
copies a finished prompt's blocks out in the step that completes it, before anyone can know of them; the
consumer copies blocks in when they have landed. The copying is done by the operation that vLLM hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from kvferry.errors import ConfigError
from kvferry.geometry import Group
from kvferry.planning.descriptors import Int64s

CopyBlocks: TypeAlias = Callable[
    [dict[str, torch.Tensor], dict[str, torch.Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
]


class HostBuffer:
    """A mirror of a device's cache in host memory.

    Attributes:
        caches: layer name to its mirror, of the same shape.
    """

    def __init__(self, device: Mapping[str, torch.Tensor], num_blocks: int, copy: CopyBlocks | None) -> None:
        """Allocate the mirror.

        Args:
            device: layer name to its cache on the device.
            num_blocks: manager blocks in it.
            copy: the engine's copy operation.

        Raises:
            ConfigError: the engine has no copy operation.
        """
        if copy is None:
            raise ConfigError(
                "vLLM handed over no copy operation for the host buffer; set host_buffer to false"
            )
        self._device = dict(device)
        self._blocks = num_blocks
        self._copy = copy
        self.caches = {name: torch.zeros(t.shape, dtype=t.dtype, device="cpu") for name, t in device.items()}

    def save(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        """Copy blocks, given per group, from the device."""
        self._each(groups, blocks, "d2h")

    def load(self, groups: Sequence[Group], blocks: Sequence[Int64s]) -> None:
        """Copy blocks, given per group, to the device."""
        self._each(groups, blocks, "h2d")

    def _each(self, groups: Sequence[Group], blocks: Sequence[Int64s], way: Literal["h2d", "d2h"]) -> None:
        for group, ids in zip(groups, blocks, strict=True):
            names = [layer.name for layer in group.layers]
            if not names or not len(ids):
                continue
            ratio = self._device[names[0]].shape[0] // self._blocks
            kernel = [int(b) * ratio + i for b in ids for i in range(ratio)]
            source, target = (self.caches, self._device) if way == "h2d" else (self._device, self.caches)
            self._copy(_of(source, names), _of(target, names), kernel, kernel, way)


def _of(caches: dict[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: caches[name] for name in names}
