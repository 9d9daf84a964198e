"""Whose bytes they are: what two engines must agree on, as facts by name.

The weights count by content (`kvferry.cache.weights`): a model's name says nothing about them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from kvferry.cache.weights import weights_of
from kvferry.engines.vllm import compat
from kvferry.engines.vllm.version import installed, vllm_version
from kvferry.errors import ConfigError
from kvferry.geometry.canonical import Canonical
from kvferry.keys.namespace import Namespace
from kvferry.transport.messages import Facts

logger = logging.getLogger(__name__)

_NOT_CONTENT = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "name_or_path",
}


_UNKNOWN = "of unknown version"
_UNVERIFIED, _DUMMY = _UNCERTAIN = ("unverified", "dummy")
"""How the weights of an engine are told that no digest vouches for."""


def facts_of(vllm_config: Any, rope: dict[str, Any], incarnation: int) -> Facts:
    """What this engine says of itself.

    Args:
        vllm_config: its configuration.
        rope: the rope settings as they are stored: those in memory change when a model is built.
        incarnation: of this engine.
    """
    return Facts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        incarnation=incarnation,
        software=f"kvferry {installed('kvferry') or _UNKNOWN}, vLLM {vllm_version() or _UNKNOWN}",
        must_agree=must_agree(vllm_config, rope),
    )


def must_agree(vllm_config: Any, rope: dict[str, Any]) -> dict[str, str]:
    """Everything that makes the bytes of another engine wrong; arguments as of `facts_of`."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "weights": _weights(vllm_config),
        "model configuration": _config_digest(model, rope),
        "model dtype": str(model.dtype).removeprefix("torch."),
        "KV cache dtype": str(cache.cache_dtype),
        "recurrent state dtypes": f"{cache.mamba_cache_dtype}, {cache.mamba_ssm_cache_dtype}",
        "quantization": str(model.quantization or "none"),
    }


def namespace_of(vllm_config: Any, canonical: Canonical) -> Namespace:
    """What chunks of this engine live in, in storage that others share.

    Raises:
        ConfigError: it is not certain whose bytes they are; says why.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = must_agree(vllm_config, compat.stored_rope(model))
    weights = facts.pop("weights")
    if weights.startswith(_UNCERTAIN):
        raise ConfigError(
            f"tiers: the weights are {weights}, so their chunks could be taken for others'; use a checkpoint "
            "that is on this machine's disk"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "tiers: scales of the quantised cache are computed at run time (calculate_kv_scales) and differ "
            "from run to run; use a checkpoint that has them"
        )
    return Namespace.of(
        weights=weights,
        model=facts,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=str(cache.cache_dtype),
        scales={},
        form=tuple(canonical.describe()),
        name=str(model.served_model_name or model.model),
    )


def _config_digest(model: Any, rope: dict[str, Any]) -> str:
    """Digest of the model's own configuration (rope, windows, heads, ...), overrides applied."""
    config = {
        k: v for k, v in model.hf_text_config.to_dict().items() if k not in _NOT_CONTENT and "rope" not in k
    }
    config["rope"] = rope
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _weights(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "dummy":
        return f"{_DUMMY}, seed {model.seed}, {vllm_config.parallel_config.tensor_parallel_size} ranks"
    checkpoint = _checkpoint(str(model.model), model.revision)
    digest = weights_of(checkpoint) if checkpoint else None
    if digest is None:
        logger.warning(
            "the checkpoint of %s is not on this machine's disk: its weights cannot be verified, "
            "peers are compared by its name and revision", model.model,
        )  # fmt: skip
        return f"{_UNVERIFIED} {model.model} at {model.revision or 'any revision'}"
    return digest


def _checkpoint(name: str, revision: str | None) -> Path | None:
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names that are not folders

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - any reason for not having it is the same to us
        return None
