"""Images, video and audio: the processor's configuration and its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.transformers_utils.processor import cached_processor_from_config

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


def processor_settings(model: Any) -> dict[str, Any]:
    """Return the effective settings of a model's multimodal processor by part; empty for a text model.

    They include the user's overrides (`mm_processor_kwargs`).

    Raises:
        Exception: any error of a processor that cannot be created.
    """
    if model.multimodal_config is None or not model.is_multimodal_model:
        return {}
    # Creates it if it does not exist yet.
    processor = cached_processor_from_config(model)
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in _PROCESSOR_PARTS}
    return {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}


def item_data(feature: Any) -> Mapping[str, Any] | None:
    """Return the output of vLLM's processor for an item, by argument of the model; None if not here."""
    # It was not sent to this process, or is in shared memory that only the workers read.
    if feature.data is None or "address" in feature.data:
        return None
    return {name: element.data for name, element in feature.data.items()}
