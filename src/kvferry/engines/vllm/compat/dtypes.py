"""Element types of the cache, as vLLM has resolved them."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.engines.vllm.compat.specs import is_recurrent, layer_specs


def cache_dtype(vllm_config: VllmConfig) -> str:
    """Return the name of the KV cache's element type (``bfloat16``, ``fp8_e4m3``, ...); never ``auto``."""
    model = vllm_config.model_config
    named: str = resolve_kv_cache_dtype_string(str(vllm_config.cache_config.cache_dtype), model)
    resolved = {"auto": str(model.dtype).removeprefix("torch."), "fp8": "fp8_e4m3"}
    return resolved.get(named, named)


def state_dtypes(kv_cache_config: KVCacheConfig) -> str:
    """Return the dtypes of the recurrent layers' states as one text; empty without recurrent layers.

    A layer can have several states (convolution and recurrent), whose dtypes are separated by commas:
    ``bfloat16, float32``. If layers differ, the text has one such list for each kind of layer, separated by
    `` | ``.
    """
    groups = kv_cache_config.kv_cache_groups
    layers = [layer for group in groups for layer in layer_specs(group.kv_cache_spec).values()]
    found = {tuple(layer.dtypes) for layer in layers if is_recurrent(layer)}
    return " | ".join(sorted(", ".join(str(one).removeprefix("torch.") for one in each) for each in found))
