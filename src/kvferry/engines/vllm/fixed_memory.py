"""Check that an engine does not move the memory of its KV cache while it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvferry.engines.vllm.compat.memory import expandable_segments
from kvferry.errors import ConfigError


def check_fixed_memory(
    vllm_config: Any, *, transfers: bool, environment: Mapping[str, str] = os.environ
) -> None:
    """Check that the engine's KV cache stays in the memory that vLLM allocates, except while it sleeps.

    Args:
        vllm_config: the engine's configuration.
        transfers: True if peers read the cache, so its memory is registered with NIXL.
        environment: environment variables of the process.

    Raises:
        ConfigError: `transfers` is True and torch uses expandable segments, whose memory cannot be registered
            reliably.
    """
    if transfers and (name := expandable_segments(vllm_config, environment)) is not None:
        raise ConfigError(
            f"{name} has expandable_segments:True, with which the memory of the KV cache cannot be "
            "registered for peers reliably; take expandable_segments out of it"
        )
