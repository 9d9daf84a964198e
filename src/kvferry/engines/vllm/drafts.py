"""Layers of a draft model, and a digest that tells one draft from another.

A draft's KV depends on the draft's own weights. Two engines that serve one model may have different drafts,
or only one of them may have a draft. Then the model's layers move between them, and the draft's layers do
not. So each layer of a draft carries a digest of the draft. Peers and stored chunks may have a layer of the
same name from another draft, and the digest tells the two apart.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvferry.engines.vllm.checkpoints import weights
from kvferry.engines.vllm.compat.drafts import keeps_draft_layers
from kvferry.engines.vllm.compat.models import draft_layer_names
from kvferry.keys.settings_text import settings_of

_THE_MODELS_OWN = "the model's own"


def draft_layers(vllm_config: Any) -> dict[str, str]:
    """Return the draft model's digest for each layer that it keeps in the cache, by the layer's name.

    Call it in a worker. The result is empty without such a draft.
    """
    names = draft_layer_names(vllm_config)
    return dict.fromkeys(names, _digest(vllm_config)) if names else {}


def draft_weights(vllm_config: Any) -> str:
    """Return the identity of the draft model's weights, as engines compare it.

    Empty if no draft keeps layers in the cache. Layers of multi-token prediction are part of the model's
    checkpoint, which is compared anyway.
    """
    if not keeps_draft_layers(vllm_config):
        return ""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    draft = speculative.draft_model_config
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
