"""Images, video and audio: the processor's configuration and its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.transformers_utils.processor import cached_processor_from_config

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


def processor_settings(model: Any) -> dict[str, Any]:
    """Return the effective settings of a model's multimodal processor; empty for a text model.

    The settings include the user's overrides (`mm_processor_kwargs`). They are read from vLLM's cached
    processor object, which is created if it does not exist yet.

    Args:
        model: vLLM's ModelConfig of the model.

    Returns:
        Settings by name, for each part such as ``image_processor``.

    Raises:
        Exception: any error of a processor that cannot be created.
    """
    if model.multimodal_config is None or not model.is_multimodal_model:
        return {}
    processor = cached_processor_from_config(model)
    parts: dict[str, Any] = {name: getattr(processor, name, None) for name in _PROCESSOR_PARTS}
    return {name: part.to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}


def item_data(feature: Any) -> Mapping[str, Any] | None:
    """Return the output of vLLM's multimodal processor for an image, a video or an audio clip of a prompt.

    The output consists of arguments for the model, by name. Return None if the scheduler's process does not
    have the output, because it was not sent there or is in shared memory that only the workers read.

    Args:
        feature: vLLM's MultiModalFeatureSpec of the item.
    """
    if feature.data is None or "address" in feature.data:
        return None
    return {name: element.data for name, element in feature.data.items()}
