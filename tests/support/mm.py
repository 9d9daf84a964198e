"""Items of prompts, as vLLM's scheduler has them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)


def feature(
    at: int, pixels: Any, identifier: str = "renderer0-mm-1-image-0", length: int = 2, **more: Any
) -> MultiModalFeatureSpec:
    """An image at a position, of which the processor has made `pixels`; None where it is not at hand."""
    data = None
    if pixels is not None:
        field = MultiModalSharedField(batch_size=1)
        tensors = {"pixel_values": torch.as_tensor(pixels), **more}
        data = MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=value, field=field) for name, value in tensors.items()}
        )
    return MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(at, length), identifier)
