"""The simulations to measure. Each runs in a process of its own, so that its memory can be measured."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvcache_sim.calculator import load_models_data
from kvcache_sim.simulator import run_sweep
from kvcache_sim.trace import parse_trace_lines

from kvferry.tools.models import read_model
from kvferry.tools.plan.find import find_config
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide, resolve_layout
from kvferry.tools.replay.settings import BlockPool, ReplaySettings, ServedModel, parse_tier, served_model
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.open import open_trace

READING = "read the trace only"
PEER = "kvcache-simulator, dense: host"
HOST_GIB = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a case.

    Attributes:
        requests: number of requests in the trace.
        seconds: CPU time of the run.
        peak_bytes: peak of the process's memory, with Python and all modules.
        hit_rate: share of the tokens of all prompts that were found; None if the case counts none. `PEER`
            counts the last half of the requests, and none if its cache is not full by then.
    """

    requests: int
    seconds: float
    peak_bytes: int
    hit_rate: float | None


def _served(name: str) -> ServedModel:
    found, config = find_config(name)
    reading = read_model(config, "auto", name=found)
    return served_model(reading, EngineSide(1, 1, resolve_layout("auto", reading), None), KeptSettings())


def _read(path: Path) -> tuple[int, float | None]:
    return sum(1 for _ in open_trace(str(path))), None


def _replay(model: str, tiers: tuple[str, ...], engine_blocks: int, path: Path) -> tuple[int, float | None]:
    trace = open_trace(str(path))
    settings = ReplaySettings(tiers=tuple(map(parse_tier, tiers)), pool=BlockPool(engine_blocks))
    found = Simulation(_served(model), settings, trace.unit_tokens).run(trace)
    return found.requests, found.hit_rate


def _peer(path: Path) -> tuple[int, float | None]:
    with path.open(encoding="utf-8") as file:
        requests = parse_trace_lines(file)
    points = run_sweep(
        requests,
        model_id="llama-3.1-8b",
        budgets_gib=[HOST_GIB],
        policies=["lru"],
        backend="python",
        models_data=load_models_data(),
    )["points"]
    found = [point["results"]["lru"] for point in points]
    rate = found[0]["hitTokens"] / found[0]["totalTokens"] if found else None
    return requests.request_count, rate


HOST = (f"host={HOST_GIB}GiB",)
CASES: Mapping[str, Callable[[Path], tuple[int, float | None]]] = {
    READING: _read,
    "dense: host": partial(_replay, "Llama-3.1-8B", HOST, 0),
    "dense: engine, host, file": partial(_replay, "Llama-3.1-8B", (*HOST, "file=2TiB"), 20_000),
    "sliding window: host": partial(_replay, "gemma-3-27b-it", ("host=512GiB",), 0),
    "recurrent: host": partial(_replay, "Qwen3-Next-80B-A3B", ("host=256GiB",), 0),
    PEER: _peer,
}


def run_case(name: str, path: Path) -> Measured:
    """Run a case in this process.

    Args:
        name: key of `CASES`.
        path: the trace.
    """
    begin = time.process_time()
    requests, hit_rate = CASES[name](path)
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Measured(requests, seconds, peak, hit_rate)
