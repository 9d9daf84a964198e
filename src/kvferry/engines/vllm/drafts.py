"""Layers of a draft model (for speculative decoding), and a digest that identifies the draft model.

Two engines that serve one model may have different draft models, or only one of them may have one. Then the
KV of the model's own layers can move between them, but that of the draft layers cannot. So the description of
each draft layer contains a digest of the draft model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvferry.engines.vllm.checkpoints import weights
from kvferry.engines.vllm.compat.models import draft_layer_names, keeps_draft_layers
from kvferry.keys.settings_text import settings_of

_THE_MODELS_OWN = "the model's own"


def draft_layers(vllm_config: Any) -> dict[str, str]:
    """Return the digest of the draft model for each of its own layers in the KV cache, by layer name.

    The result is empty without a draft model that has such layers. Call this in a worker.
    """
    names = draft_layer_names(vllm_config)
    return dict.fromkeys(names, _digest(vllm_config)) if names else {}


def draft_weights(vllm_config: Any) -> str:
    """Return a text that identifies the draft model's weights.

    The text is empty without a draft model that has layers of its own in the KV cache.
    """
    if not keeps_draft_layers(vllm_config):
        return ""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    draft = speculative.draft_model_config
    # Multi-token prediction: the draft model is a part of the checkpoint that is digested anyway.
    if (draft.model, draft.revision) == (model.model, model.revision):
        return _THE_MODELS_OWN
    return weights(vllm_config, draft, speculative.draft_load_config or vllm_config.load_config)


def _digest(vllm_config: Any) -> str:
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    parts = {
        "method": speculative.method,
        "weights": draft_weights(vllm_config),
        "configuration": settings_of(draft.hf_config.to_dict()),
        "dtype": str(draft.dtype),
        "quantization": str(draft.quantization),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
