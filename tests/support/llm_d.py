"""The requests that llm-d's routing sidecar makes for its connector ``nixlv2``, in its order.

The sidecar is written in Go, and its modules cannot be had without a Go module proxy. So this sends what the
sidecar sends, read from `runNIXLProtocolV2` in pkg/sidecar/proxy/connector_nixlv2.go of
https://github.com/llm-d/llm-d-inference-scheduler at commit 520af478 (Apache-2.0). The former repository,
llm-d-routing-sidecar, sends the same. Left out: tracing, and the count of cached tokens in answers.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import httpx

_LIMITS = ("max_tokens", "max_completion_tokens")
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Sidecar:
    """The sidecar of a decode engine, for a client of httpx: requests pass the prefill engine first."""

    prefill: str
    decode: str

    def post(self, path: str, *, json: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """Send a request to the prefill engine and then to the decode engine; return the latter's answer."""
        # Go's Header.Add: an id that the caller sent stays, and is the first of two.
        passed = [*headers.items(), ("content-type", "application/json"), ("x-request-id", str(uuid.uuid1()))]
        first = {**json, "kv_transfer_params": _ASKED, "stream": False} | dict.fromkeys(_LIMITS, 1)
        first.pop("stream_options", None)
        with httpx.Client(timeout=60, trust_env=False) as client:
            prefilled = client.post(self.prefill + path, content=_encoded(first), headers=passed)
            prefilled.raise_for_status()
            second = {**json, "kv_transfer_params": prefilled.json().get("kv_transfer_params")}
            return client.post(self.decode + path, content=_encoded(second), headers=passed)


def _encoded(body: dict[str, Any]) -> bytes:
    """Encode a body as Go encodes a map: without spaces, keys sorted."""
    return json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
