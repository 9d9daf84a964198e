"""`KpoolTailSpec`, a KV cache spec that only vLLM 0.31 has."""

from __future__ import annotations

from typing import Any

from vllm.v1 import kv_cache_interface

_WHY = (
    "it is a ring of one block, which vLLM 0.31 describes as a sliding window; "
    "install vLLM 0.32 or newer, or serve this model without a KV connector"
)


def refused_kpool() -> dict[type[Any], str]:
    """Return the spec with the reason why kvferry cannot move it; empty where vLLM does not have the spec."""
    spec = getattr(kv_cache_interface, "KpoolTailSpec", None)
    return {} if spec is None else {spec: _WHY}
