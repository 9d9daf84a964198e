"""Ways in which vLLM and torch may release or move the memory of a KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from kvferry.engines.vllm.compat.models import worker_of
from kvferry.errors import ConfigError

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables for torch's allocator. torch uses the first one that is set."""

_GIVES_UP = ("sleep", "discard")
"""Methods of a worker behind ``/sleep``, ``/release_kv_cache_memory`` and the same calls in Python.

These methods do not check ``enable_sleep_mode``. They release the memory of the KV cache even if only
``enable_cumem_allocator`` or another ``sleep_mode_backend`` is set.
"""


def sleeps(vllm_config: Any) -> bool:
    """Return True if the engine may sleep (release its device memory): ``enable_sleep_mode`` is set."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def expandable_segments(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the environment variable that makes torch use expandable segments for the KV cache.

    The result is None if torch does not use expandable segments for the KV cache: if no variable asks for
    them, if the KV cache is in CPU memory, or if vLLM allocates it with its cumem allocator, which turns them
    off.

    Args:
        vllm_config: the engine's configuration.
        environment: environment variables of the engine's process, by name.
    """
    if vllm_config.device_config.device_type == "cpu":
        return None
    if getattr(vllm_config.model_config, "enable_cumem_allocator", False):
        return None
    name = next((name for name in _VARIABLES if environment.get(name)), "")
    for option in environment.get(name, "").split(","):
        key, _, value = option.partition(":")
        if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
            return name
    return None


def keep_memory(vllm_config: Any) -> None:
    """Make the worker in this process refuse every call that would release the memory of its KV cache.

    Raises:
        ConfigError: the worker is not in this process.
    """
    worker = worker_of(vllm_config)
    for name in _GIVES_UP:
        setattr(worker, name, _refuse)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "this engine does not sleep: kvferry and its peers go on using the memory of its KV cache; pause it "
        "(/pause), or run it without kvferry"
    )
