"""Facts of engines that a test compares: functions of `inside`."""

from __future__ import annotations

from typing import Any

from support.vllm_engine import parts


def facts(engine: Any) -> dict[str, Any]:
    """What this engine tells its peers that they must agree on; nothing if it has tiers alone."""
    server = parts.server(engine)
    return {} if server is None else dict(server._card.facts.must_agree)


def restart_other(engine: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Start a second engine in this process in place of the last one; its facts.

    As a process of its own would, it builds its own rotary embeddings: vLLM keeps those of a process by
    arguments, without `max_model_len`. The last one is not stopped: that would end the workers' halves of all
    engines of the process.
    """
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding

    from support.vllm_engine import inside

    engine.left = [*getattr(engine, "left", ()), getattr(engine, "other", None)]
    rotary_embedding._ROPE_DICT.clear()
    parallel_state.destroy_model_parallel()  # another model may need other groups
    inside.start_another(engine, settings)
    return facts(engine.other)
