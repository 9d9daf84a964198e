"""A model that takes images: vLLM's own processing of prompts runs on it without weights."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from kvferry.tools.serving.tiny import trained_tokenizer
from support.vllm_config import inspect_models_here

IMAGE_TOKEN, IMAGE_TOKENS = 2048, 16
_SIZE = {"height": 56, "width": 56}


def paligemma(folder: Path, tokenizers: Path) -> Path:
    """Write configuration, tokenizer and processor of a tiny PaliGemma; its folder.

    Of the models that take images it is one that vLLM can import without torchvision.
    """
    from transformers import PaliGemmaConfig, SiglipImageProcessorPil

    text = {
        "model_type": "gemma", "vocab_size": 2112, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        "projection_dim": 64, "num_image_tokens": IMAGE_TOKENS,
    }  # fmt: skip
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, projection_dim=64
    )
    config.architectures = ["PaliGemmaForConditionalGeneration"]
    config.save_pretrained(folder)
    for file in trained_tokenizer(tokenizers).iterdir():
        shutil.copy(file, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, text in enumerate(("<image>", "\n")):  # the processor looks both up
        token = {"id": IMAGE_TOKEN + number, "content": text, "special": not number, **flags}
        tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    SiglipImageProcessorPil(size=_SIZE, image_seq_length=IMAGE_TOKENS).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_seq_length": IMAGE_TOKENS}))
    (folder / "processor_config.json").write_text('{"processor_class": "PaliGemmaProcessor"}')
    return folder


def with_weights(model: Path) -> Path:
    """Give the tiny PaliGemma random weights; its folder."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, PaliGemmaForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = PaliGemmaForConditionalGeneration(AutoConfig.from_pretrained(model))
        for name, weight in made.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, 0.0, 0.01 if "embed_tokens" in name else 0.15)
    made.to(torch.bfloat16).save_pretrained(model)
    path = model / "model.safetensors"
    # vLLM reads the names of published checkpoints, which transformers no longer writes.
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    return model


def noise(seed: int) -> Any:
    """Return an image of random pixels, the same for the same seed."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 48, 3), np.uint8))


def model_config(model: Path, **arguments: Any) -> Any:
    """vLLM's configuration of that model."""
    from vllm.engine.arg_utils import EngineArgs

    inspect_models_here()

    return EngineArgs(model=str(model), dtype="float32", **arguments).create_model_config()


def feature(config: Any, image: Any, identifier: str | None = None) -> Any:
    """The image as a request of an engine has it, processed by vLLM.

    Args:
        config: of `model_config`.
        image: PIL's.
        identifier: in place of vLLM's own hash: what it uses without prefix caching and processor cache.
    """
    # vLLM imports Pixtral's module along with every vision encoder; that one needs torchvision.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", mock.MagicMock())
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.parse import parse_mm_uuids
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    processor = MULTIMODAL_REGISTRY.create_processor(config)
    inputs = ProcessorInputs(
        [2, 5, 7],
        processor.info.parse_mm_data({"image": image}),
        parse_mm_uuids({"image": [identifier]} if identifier else None),
        hf_processor_mm_kwargs=config.multimodal_config.merge_mm_processor_kwargs({}),
    )
    done = processor.apply(inputs, TimingContext(enabled=False))
    (item,), (place,) = done["mm_kwargs"]["image"], done["mm_placeholders"]["image"]
    (name,) = done["mm_hashes"]["image"]
    return MultiModalFeatureSpec(item, "image", name, place, name)
