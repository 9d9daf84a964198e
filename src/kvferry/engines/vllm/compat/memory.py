"""Ways in which vLLM and torch may release or move the memory of a KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

from kvferry.engines.vllm.compat.models import worker_of

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables for torch's allocator. torch uses the first one that is set."""

_CACHE, _WEIGHTS = "kv_cache", "weights"
"""vLLM's tags of memory that a worker can give up and get back."""
_LOSES_WEIGHTS = 2
"""Level of sleep from which the weights are discarded."""


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


def hook_sleep(
    vllm_config: Any,
    *,
    release: Callable[[], None],
    restore: Callable[[], None],
    lose_weights: Callable[[], None],
) -> None:
    """Make a worker call functions when it gives up the memory of its KV cache and gets it back; mutates it.

    ``/sleep``, ``/release_kv_cache_memory`` and ``/wake_up`` end in the patched methods. There vLLM 0.33
    calls hooks of connectors (``unregister_kv_caches``, ``restore_kv_caches``). They would not do: 0.32 lacks
    them, and they do not tell whether the weights are lost.

    Args:
        vllm_config: the engine's configuration.
        release: function to call before the memory of the KV cache is given up. An exception prevents that.
        restore: function to call when the KV cache has memory again, at the same addresses.
        lose_weights: function to call before the weights are discarded.

    Raises:
        ConfigError: the worker is not in this process.
    """
    worker = worker_of(vllm_config)
    sleep, discard, wake_up = worker.sleep, worker.discard, worker.wake_up

    def give_up(tags: Collection[str]) -> None:
        if _CACHE in tags:
            release()
        if _WEIGHTS in tags:
            lose_weights()

    @wraps(sleep)
    def sleep_after_release(level: int = 1) -> None:
        give_up((_CACHE, _WEIGHTS) if level >= _LOSES_WEIGHTS else (_CACHE,))
        sleep(level=level)

    @wraps(discard)
    def discard_after_release(tags: tuple[str, ...]) -> None:
        give_up(tags)
        discard(tags)

    @wraps(wake_up)
    def wake_up_and_restore(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or _CACHE in tags:
            restore()

    worker.sleep, worker.discard = sleep_after_release, discard_after_release
    worker.wake_up = wake_up_and_restore
