"""An engine's configuration, as far as the scheduler half reads it before a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def inspect_models_here() -> None:
    """Let vLLM inspect model classes in this process: it starts another one for each class, for seconds."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def configured(
    engine_id: str = "e",
    index: int = 0,
    *,
    role: str = "kv_both",
    endpoint: str | None = None,
    engines: int = 1,
) -> SimpleNamespace:
    """Return the part of vLLM's VllmConfig that is read.

    Args:
        engine_id: name of the engine.
        index: data-parallel index of the engine.
        role: of the connector.
        endpoint: for traces.
        engines: number of data-parallel engines.
    """
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=index, data_parallel_size=engines, tensor_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        use_v2_model_runner=False,
        kv_transfer_config=SimpleNamespace(engine_id=engine_id, kv_role=role),
        model_config=SimpleNamespace(
            model="tiny", max_model_len=400, model_weights="", revision=None, dtype="torch.float16",
            quantization=None, quantization_config=None, multimodal_config=None, is_multimodal_model=False,
            hf_config=SimpleNamespace(), seed=0,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto", ignore_patterns=[]),
        diffusion_config=None,
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        speculative_config=None,
        num_speculative_tokens=0,
        max_concurrent_batches=1,
        kv_events_config=None,
        observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint),
        lora_config=None,
        max_in_flight_tokens=256,
        num_prefill_lookahead_tokens=0,
    )  # fmt: skip


def scheduler_connector(vllm_config: Any, kv_cache_config: Any, config: Any) -> Any:
    """Return the connector of a scheduler, without the checks and patches of an engine's start."""
    from kvferry.engines.vllm.compat.connectors import KVConnectorBase_V1, KVConnectorRole
    from kvferry.engines.vllm.connector import KVFerryConnector

    made = KVFerryConnector.__new__(KVFerryConnector)
    KVConnectorBase_V1.__init__(made, vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    made._workers = {}
    made._open_scheduler(config)
    return made
