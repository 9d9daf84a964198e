"""Engines at rest: what they still hold, and what they have counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.tools.serving.engine import EngineProcess
from kvferry.tools.serving.role import Role

REST_SECONDS = 40.0
"""How long engines may take until they hold nothing, once nobody asks."""
HELD = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "kvferry_leases",
    "kvferry_late_blocks",
    "kvferry_pending_loads",
)


async def held_at_rest(
    engines: Sequence[EngineProcess], model: str, seconds: float = REST_SECONDS
) -> list[str]:
    """Wait until no engine holds anything; return what they held to the end."""
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        while True:
            for engine in engines:
                await _step(client, engine.spec.url, model)
            held = [
                f"{engine.spec.name} holds {what}"
                for engine in engines
                if (what := ", ".join(held_of(await _page(client, engine))))
            ]
            if not held or time.monotonic() > until:
                return held
            await asyncio.sleep(1)


async def _step(client: httpx.AsyncClient, url: str, model: str) -> None:
    """Have an engine step: at rest it looks at no clock, and keeps turns whose time is up."""
    body = {"model": model, "prompt": "the", "max_tokens": 2, "temperature": 0}
    (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()


async def _page(client: httpx.AsyncClient, engine: EngineProcess) -> str:
    reply = await client.get(f"{engine.spec.url}/metrics")
    reply.raise_for_status()
    return reply.text


def held_of(page: str) -> list[str]:
    """Return what an engine holds by its metrics, or cannot say.

    >>> held_of("# TYPE kvferry_leases gauge\\nkvferry_leases 2.0\\n")[-1]
    'kvferry_leases 2'
    """
    found = {family.name: family.samples for family in text_string_to_metric_families(page)}
    missing = [f"something unknown: it has no metric {name}" for name in HELD if name not in found]
    sums = {name: sum(sample.value for sample in found[name]) for name in HELD if name in found}
    return [*missing, *(f"{name} {value:g}" for name, value in sums.items() if value)]


async def counted(engines: Sequence[EngineProcess]) -> tuple[Counter[str], Counter[str]]:
    """Return the tokens that came from each tier and peer, and how loads ended."""
    tokens: Counter[str] = Counter()
    loads: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for engine in engines:
            where = "prefill" if engine.spec.role is Role.PREFILL else "decode"
            for family in text_string_to_metric_families(await _page(client, engine)):
                for sample in family.samples:
                    if sample.name == "kvferry_hit_tokens_total":
                        tokens[f"{sample.labels['tier']}, at the {where} engine"] += int(sample.value)
                    if sample.name == "kvferry_loads_total":
                        loads[sample.labels["outcome"]] += int(sample.value)
    return tokens, loads
