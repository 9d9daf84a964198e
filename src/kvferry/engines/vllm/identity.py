"""Facts about an engine that decide the content of its KV: weights, settings and element types.

Two engines exchange KV only if these facts are equal, and an engine loads a stored chunk only if they are
equal to those of the engine that stored it. Weights are compared by content (`kvferry.cache.weights`),
because a model's name does not identify them. The other facts are read from objects that vLLM has built: the
model of every worker (`built`), the processor, and the resolved element types.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from kvferry.cache.weights import weights_of
from kvferry.common.errors import ConfigError
from kvferry.connector.content import CACHE_DTYPE, MODEL_DTYPE, WEIGHTS, namespace_of_facts
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.model import (
    draft_layer_names,
    keeps_draft_layers,
    kind_of_device,
    processor_settings,
)
from kvferry.engines.vllm.compat.specs import cache_dtype, state_dtypes
from kvferry.engines.vllm.version import installed, vllm_version
from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.namespace import Namespace, settings_of, text_of
from kvferry.transport.messages import Fact, Facts

logger = logging.getLogger(__name__)

_UNVERIFIED, _DUMMY = _DESCRIPTIONS = ("unverified", "dummy")
"""First words of a description of weights without a digest."""

_MULTIMODAL = (
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
)
_UNKNOWN = "of unknown version"


def weights(vllm_config: Any, model: Any, load_config: Any) -> str:
    """Return a text that identifies weights: a digest, or a description without one."""
    load_format = str(load_config.load_format)
    name = str(model.model_weights or model.model)
    # Such a file is not the checkpoint whose name is given.
    if load_format == "tensorizer":
        return f"{_UNVERIFIED} {load_format} of {name}"
    # Dummy weights depend on the number of ranks.
    if load_format == "dummy":
        return f"{_DUMMY}, seed {model.seed}, {vllm_config.parallel_config.tensor_parallel_size} ranks"
    checkpoint = _checkpoint(name, model.revision)
    digest = weights_of(checkpoint) if checkpoint else None
    if digest is None:
        logger.warning(
            "the checkpoint of %s is not on this machine's disk: its weights cannot be verified, "
            "peers are compared by its name and revision", name,
        )  # fmt: skip
        return f"{_UNVERIFIED} {name} at {model.revision or 'any revision'}"
    return digest


def _checkpoint(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's checkpoint on this machine's disk."""
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for names that are not folders

        # An engine has downloaded it by now, so nothing is downloaded here.
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the reason, there is no checkpoint to read
        return None


def draft_layers(vllm_config: Any) -> dict[str, str]:
    """Return the digest of the draft model for each of its own layers in the KV cache, by layer name.

    Call this in a worker.
    """
    names = draft_layer_names(vllm_config)
    if not names:
        return {}
    draft = vllm_config.speculative_config.draft_model_config
    parts = {
        "method": vllm_config.speculative_config.method,
        "weights": draft_weights(vllm_config),
        "configuration": settings_of(draft.hf_config.to_dict()),
        "dtype": str(draft.dtype),
        "quantization": str(draft.quantization),
    }
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
    return dict.fromkeys(names, digest)


def draft_weights(vllm_config: Any) -> str:
    """Return a text that identifies the weights of a draft model with layers in the KV cache, if any."""
    if not keeps_draft_layers(vllm_config):
        return ""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    draft = speculative.draft_model_config
    # Multi-token prediction: the draft model is a part of the checkpoint that is digested anyway.
    if (draft.model, draft.revision) == (model.model, model.revision):
        return "the model's own"
    return weights(vllm_config, draft, speculative.draft_load_config or vllm_config.load_config)


def facts_of(vllm_config: Any, must_agree: Mapping[str, Fact], incarnation: int) -> Facts:
    """Return what this engine tells its peers about itself: its id, this run's number, and its software."""
    return Facts(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        incarnation=incarnation,
        software=f"kvferry {installed('kvferry') or _UNKNOWN}, vLLM {vllm_version() or _UNKNOWN}",
        must_agree=dict(must_agree),
    )


def must_agree(vllm_config: Any, kv_cache_config: Any, built: Built) -> dict[str, Fact]:
    """Return the properties, by name, that must be equal in engines that use each other's KV."""
    model = vllm_config.model_config
    facts: dict[str, Fact] = {
        WEIGHTS: weights(vllm_config, model, vllm_config.load_config),
        MODEL_DTYPE: str(model.dtype).removeprefix("torch."),
        CACHE_DTYPE: cache_dtype(vllm_config),
        "quantization": str(model.quantization or "none"),
    }
    if states := state_dtypes(kv_cache_config):
        facts["recurrent state dtypes"] = states
    facts["engine settings"] = engine_settings(vllm_config)
    if (processor := _processor(model)) is not None:
        facts["multimodal processor"] = processor
    return {**facts, **built.facts()}


def engine_settings(vllm_config: Any) -> dict[str, str]:
    """Return the settings that affect KV but cannot be seen in the built model, as texts by name."""
    model = vllm_config.model_config
    return settings_of(
        {
            "quantization_config": _plain(model.quantization_config),
            "ignore_patterns": vllm_config.load_config.ignore_patterns,
            "diffusion_config": _plain(vllm_config.diffusion_config),
            "additional_config": _plain(vllm_config.additional_config),
            **{name: getattr(model.multimodal_config, name, None) for name in _MULTIMODAL},
        }
    )


def _plain(value: Any) -> Any:
    # Some configurations are no dataclasses, but compute a hash of their own.
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.compute_hash() if hasattr(value, "compute_hash") else value


def lora_settings(vllm_config: Any) -> str:
    """Return a text with the settings that change what LoRA adapters compute; empty without LoRA."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    # Part of an adapter's name, so engines with different settings do not find each other's chunks for it.
    dtype = str(lora.lora_dtype).removeprefix("torch.")
    modules = ",".join(sorted(lora.target_modules)) if lora.target_modules else "all"
    tower = " and the vision tower" if lora.enable_tower_connector_lora else ""
    return text_of(f"in {dtype} on {modules} modules{tower}")


def namespace_of(vllm_config: Any, must_agree: Mapping[str, Fact], canonical: CanonicalForm) -> Namespace:
    """Return the namespace of this engine's chunk keys in shared storage.

    Raises:
        ConfigError: the weights have no digest, or the scales of a quantised cache are computed at run time.
    """
    model = vllm_config.model_config
    whose = str(must_agree[WEIGHTS])
    for name, found in (("weights", whose), ("weights of the draft model", draft_weights(vllm_config))):
        # Engines with equal descriptions may have different weights.
        if found.startswith(_DESCRIPTIONS):
            raise ConfigError(
                f"tiers: the {name} are {found}, so their chunks could be taken for others'; use a "
                "checkpoint that is on this machine's disk"
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "tiers: scales of the quantised cache are computed at run time (calculate_kv_scales) and differ "
            "from run to run; use a checkpoint that has them"
        )
    name = str(model.served_model_name or model.model)
    if canonical.opaque:
        # Nobody has said what these bytes mean, so they are for the software and the kind of device that
        # wrote them.
        must_agree = {**must_agree, "writer of opaque pages": f"vLLM {vllm_version()} on {kind_of_device()}"}
    return namespace_of_facts(must_agree, canonical, name)


def _processor(model: Any) -> dict[str, str] | None:
    """Return the settings of a model's processor as texts; None without one that can be inspected."""
    try:
        # KV is correct even without this comparison, because items are named by a digest of the processor's
        # output. But the log of two engines can name the setting.
        parts = processor_settings(model)
    except Exception as error:  # noqa: BLE001 - processors come from checkpoints and raise anything
        logger.warning(
            "the multimodal processor cannot be looked at (%s); peers are not told how it is configured",
            error,
        )
        return None
    given = getattr(model.multimodal_config, "mm_processor_kwargs", None) or {}
    return settings_of({**parts, "mm_processor_kwargs": given}) or None
