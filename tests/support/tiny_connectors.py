"""Out-of-tree connectors that do what their settings say: stand-ins where no engine runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class Tally(KVConnectorStats):
    def __init__(self, data: dict | None = None) -> None:
        super().__init__(data or {"n": 0})

    def reset(self) -> None:
        self.data = {"n": 0}

    def aggregate(self, other: KVConnectorStats) -> Tally:
        self.data["n"] += other.data["n"]
        return self

    def reduce(self) -> dict[str, int | float]:
        return {"n": self.data["n"]}

    def is_empty(self) -> bool:
        return not self.data["n"]


class TallyMetrics(KVConnectorPromMetrics):
    """As kvferry's own do, it forgets what this process had registered before."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for collector in [c for c in REGISTRY._collector_to_names if getattr(c, "_name", "") == "tiny_tally"]:
            REGISTRY.unregister(collector)
        self._counter = self._counter_cls(
            name="tiny_tally", documentation="n", labelnames=[*given[2], "colour"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._counter.labels(*self.per_engine_labelvalues[engine_idx], "red").inc(transfer_stats_data["n"])


class Plain(KVConnectorBase_V1):
    """Notes every call in `calls`; `said` is what a hook answers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[tuple] = []
        self.said: dict[str, Any] = {}

    @classmethod
    def _extra(cls, config: Any) -> dict[str, Any]:
        return config.kv_transfer_config.kv_connector_extra_config

    def _note(self, name: str, *args: Any, default: Any = None) -> Any:
        self.calls.append((name, *args))
        answer = self.said.get(name, default)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start_load_kv(self, forward_context, **kwargs):
        self._note("start_load_kv", forward_context, kwargs)

    def wait_for_layer_load(self, layer_name):
        self._note("wait_for_layer_load", layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._note("save_kv_layer", layer_name)

    def wait_for_save(self):
        self._note("wait_for_save")

    def handle_preemptions(self, kv_connector_metadata):
        self._note("handle_preemptions", kv_connector_metadata)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self._note("get_num_new_matched_tokens", default=(0, False))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._note("update_state_after_alloc", num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._note("build_connector_meta")

    def update_connector_output(self, connector_output):
        self._note(
            "update_connector_output",
            connector_output.kv_connector_worker_meta,
            connector_output.kv_cache_events,
        )

    def request_finished(self, request, block_ids):
        return self._note("request_finished", block_ids, default=(False, None))

    def register_finished_partial_tail(self, request, block_ids, partial_tail_offloads):
        return self._note("register_finished_partial_tail", default=False)

    def set_xfer_handshake_metadata(self, metadata):
        self._note("set_xfer_handshake_metadata", metadata)

    def get_handshake_metadata(self):
        return self._note("get_handshake_metadata")

    def get_finished_count(self):
        return self._extra(self._vllm_config).get("count")

    def get_mem_pool_context(self):
        return nullcontext() if self._extra(self._vllm_config).get("pool") else None

    def shutdown(self):
        self._note("shutdown")

    def get_kv_connector_stats(self):
        return self._note("get_kv_connector_stats")

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return cls._extra(vllm_config).get("layout")

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return bool(extra_config.get("piecewise"))

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Tally(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return TallyMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class Hybrid(Plain, SupportsHMA):
    """One that can do with the hybrid KV cache manager."""

    def request_finished_all_groups(self, request, block_ids):
        return self._note("request_finished_all_groups", block_ids, default=(False, None))
