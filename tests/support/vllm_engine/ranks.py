"""What a test asks the ranks of an engine, each in a process of its own.

Engines started with `WITNESS` as their workers' extension mix `RankWitness` into these. Of served ones,
started with `ARGUMENTS` and `ENVIRONMENT`, `ask_ranks` calls its methods over the development endpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx

from support.vllm_engine.parts import only_half

WITNESS = "support.vllm_engine.ranks.RankWitness"
ARGUMENTS = (f"--worker-extension-cls={WITNESS}",)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # One small function behind logprobs would be compiled anew in every engine.
    "TORCH_COMPILE_DISABLE": "1",
}


def ask_ranks(url: str, method: str, *arguments: Any) -> list[Any]:
    """The answer of every rank of the engine at `url`."""
    body = {"method": method, "args": [json.dumps(each) for each in arguments]}
    answer = httpx.post(f"{url}/collective_rpc", json=body, timeout=60, trust_env=False).raise_for_status()
    return answer.json()["results"]


class RankWitness:
    """Methods of a worker: arguments come as JSON."""

    def witness_loads(self, spoil_rank: str) -> dict[str, Any]:
        """Look at every load when it is believed, and spoil its last blocks on that rank, if on any."""
        half = only_half()
        half.witnessed, half.spoiled = [], json.loads(spoil_rank) == half.geometry.tp_rank
        if not hasattr(half, "unwatched"):
            half.unread = {}
            half.unwatched, half.ended = half.ended, lambda: _watched(half)
            half.unread_loads, begin = {}, half.begin
            half.begin = lambda orders: _begun(half, begin, orders)
        return {}

    def witnessed_loads(self) -> list[dict[str, Any]]:
        """The loads since the last call: where they came from, and digests of what is here."""
        half = only_half()
        taken, half.witnessed = half.witnessed, []
        return taken

    def layout_held(self) -> str:
        """Memory layout of the cache."""
        return str(only_half().layout)

    def digests_held(self, load: str) -> dict[str, list[str]]:
        """Digests of what a load was to bring, on the rank it came from."""
        from kvferry.planning.select import LoadSpan
        from support.vllm_engine.pages import digests_of

        told = json.loads(load)
        return digests_of(only_half(), told["tables"], LoadSpan(*told["span"]))


def _begun(half: Any, begin: Any, orders: Any) -> None:
    from kvferry.transport.read_plan import ReadOrder

    half.unread_loads |= {load.key: load for load in orders.loads}
    # What comes from the tiers is not looked at.
    half.unread |= {
        part.load: (half.unread_loads[part.load], part.work)
        for part in orders.parts
        if isinstance(part.work, ReadOrder)
    }
    begin(orders)


def _watched(half: Any) -> Any:
    from support.vllm_engine.pages import digests_of, negate

    results = half.unwatched()
    for key, (load, read) in list(half.unread.items()):
        if load.request_id not in results.received:
            continue
        del half.unread[key]
        if load.request_id in results.failed:
            continue
        span = [load.span.local_tokens, load.span.total, load.span.prompt, load.span.part]
        digests = digests_of(half, load.tables, load.span)
        tables = [ids.tolist() for ids in read.src_tables]
        half.witnessed.append({"span": span, "tables": tables, "digests": digests})
        if half.spoiled:
            for group, ids in zip(half.geometry.groups, half.needed(load.span, load.tables), strict=True):
                for layer in group.layers:
                    negate(half, layer, int(ids[-1]))
    return results
