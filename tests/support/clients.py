"""HTTP clients for vLLM's servers."""

from __future__ import annotations

import httpx

# vLLM's server closes an idle connection after 5 seconds, which is httpx's own limit too. A request that is
# sent just then fails.
LIMITS = httpx.Limits(keepalive_expiry=2)


def engine_client(timeout: float) -> httpx.Client:
    # trust_env: ignore a proxy set in the environment, because the engines are on this machine.
    return httpx.Client(timeout=timeout, trust_env=False, limits=LIMITS)
