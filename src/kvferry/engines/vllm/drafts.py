"""Layers of a draft model, and whose they are.

What a draft keeps depends on its own weights. Two engines that serve one model may have different drafts, or
one of them none: then the model's layers move, and the draft's do not. So each layer of a draft carries a
digest of the draft, which tells it from another draft's layer of the same name in peers and in stored chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from kvferry.cache.weights import weights_of
from kvferry.engines.vllm import compat
from kvferry.engines.vllm.identity import checkpoint_of

_NOT_CONTENT = {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"}


def draft_layers(vllm_config: Any) -> dict[str, str]:
    """Name of each layer that a draft model keeps in the cache, with the draft's digest; for workers."""
    names = compat.draft_layer_names(vllm_config)
    return dict.fromkeys(names, _digest(vllm_config)) if names else {}


def _digest(vllm_config: Any) -> str:
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    parts = {
        "method": speculative.method,
        "weights": _weights(vllm_config.model_config, draft),
        "configuration": dict(_settings(draft.hf_config.to_dict())),
        "dtype": str(draft.dtype),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _weights(model: Any, draft: Any) -> str:
    """Digest of the draft's weights; MTP layers are part of the model's own, which peers compare anyway."""
    if (draft.model, draft.revision) == (model.model, model.revision):
        return "the model's own"
    checkpoint = checkpoint_of(str(draft.model), draft.revision)
    digest = weights_of(checkpoint) if checkpoint else None
    return digest or f"unverified {draft.model} at {draft.revision or 'any revision'}"


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that are plain values, and those of rotary embeddings; nested configurations repeat them."""
    for name, value in config.items():
        if name not in _NOT_CONTENT and ("rope" in name or isinstance(value, int | float | str | None)):
            yield name, json.dumps(value, sort_keys=True, default=str)
