"""Host memory that mirrors a device's KV cache, for devices that the transport cannot register.

The buffer has the same blocks as the cache, so the rest of kvferry uses it like any other cache. A prefill
engine copies the blocks of a prompt to the buffer in the step that completes the prompt, before it offers
them to peers. The engine that loads copies blocks to its device when they have arrived in its own buffer.
vLLM hands over the operation that copies.
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
    """Copy of a device's KV cache in host memory, which peers read and write.

    Attributes:
        caches: host tensor of each layer, by layer name, with the shape and dtype of the layer's cache on the
            device.
    """

    def __init__(self, device: Mapping[str, torch.Tensor], num_blocks: int, copy: CopyBlocks | None) -> None:
        """Allocate zeroed host memory of the size of the device's KV cache, whose tensors are by layer name.

        Raises:
            ConfigError: vLLM has handed over no operation that copies blocks.
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
            source, target = (
                (self.caches, self._device) if direction == "h2d" else (self._device, self.caches)
            )
            self._copy(_select(source, names), _select(target, names), kernel, kernel, direction)


def _select(caches: dict[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: caches[name] for name in names}
