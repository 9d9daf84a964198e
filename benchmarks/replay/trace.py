"""A trace for the benchmark, made up of conversations."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from kvferry.tools.replay.trace.workload import Workload

WORKLOAD = Workload(
    users=2000,
    requests_per_second=20,
    shared_prompt_tokens=1024,
    turns=4,
    prompt_tokens=500,
    output_tokens=250,
    hours=25_000,
    unit_tokens=256,
)


def write_trace(path: Path, requests: int) -> None:
    """Write the first requests of `WORKLOAD` in the format of `kvcache-simulator`.

    Args:
        path: file to write.
        requests: number of requests.
    """
    with path.open("w", encoding="utf-8") as file:
        for request in islice(WORKLOAD.requests(), requests):
            whole = request.prompt_tokens // request.unit_tokens
            ids = request.prefix_ids[:whole].tolist()
            if request.prompt_tokens % request.unit_tokens:
                ids.append(request.prompt_id)
            line = {
                "block_size": request.unit_tokens,
                "hash_ids": ids,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "timestamp": request.arrival * 1000,
            }
            file.write(json.dumps(line) + "\n")
