"""Ways in which vLLM and torch may release or move the memory of a KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

from kvferry.engines.vllm.compat.models import worker_of
from kvferry.errors import ConfigError

# torch uses the first of these variables that is set.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

_CACHE, _WEIGHTS = "kv_cache", "weights"
"""vLLM's tags of memory that a worker can give up and get back."""
_LOSES_WEIGHTS = 2
"""Level of sleep from which the weights are discarded."""


def check_fixed_memory(
    vllm_config: Any, *, transfers: bool, environment: Mapping[str, str] = os.environ
) -> None:
    """Check that the KV cache stays in the memory that vLLM allocates, except while the engine sleeps.

    Args:
        transfers: True if peers read the cache, so its memory is registered with NIXL.

    Raises:
        ConfigError: `transfers` is True and torch uses expandable segments for the KV cache.
    """
    # Memory on CPUs is not torch's CUDA allocator's. vLLM's cumem allocator turns expandable segments off.
    if (
        not transfers
        or vllm_config.device_config.device_type == "cpu"
        or getattr(vllm_config.model_config, "enable_cumem_allocator", False)
    ):
        return
    name = next((name for name in _VARIABLES if environment.get(name)), "")
    for option in environment.get(name, "").split(","):
        key, _, value = option.partition(":")
        if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
            raise ConfigError(
                f"{name} has expandable_segments:True, with which the memory of the KV cache cannot be "
                "registered for peers reliably; take expandable_segments out of it"
            )


def hook_sleep(
    vllm_config: Any,
    *,
    release: Callable[[], None],
    restore: Callable[[], None],
    lose_weights: Callable[[], None],
) -> None:
    """Make a worker call functions when it gives up the memory of its KV cache and gets it back; mutates it.

    Args:
        release: called before the memory of the KV cache is given up. An exception prevents that.
        restore: called when the KV cache has memory again, at the same addresses.
        lose_weights: called before the weights are discarded.

    Raises:
        ConfigError: the worker is not in this process.
    """
    worker = worker_of(vllm_config)
    # `/sleep`, `/release_kv_cache_memory` and `/wake_up` end in these methods. vLLM 0.33 has hooks of
    # connectors there (`unregister_kv_caches`, `restore_kv_caches`), but 0.32 lacks them, and they do not
    # tell whether the weights are lost.
    sleep, discard, wake_up = worker.sleep, worker.discard, worker.wake_up

    def give_up(tags: Collection[str]) -> None:
        # The cache first: `release` refuses while loads are under way, and then nothing has changed.
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
        # No tags stand for all memory.
        if tags is None or _CACHE in tags:
            restore()

    worker.sleep, worker.discard = sleep_after_release, discard_after_release
    worker.wake_up = wake_up_and_restore
