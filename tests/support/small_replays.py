"""Replays of small traces whose outcome can be counted by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvferry.tools.models import read_model
from kvferry.tools.plan.kept import KeptSettings
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.replay.passes import Passes
from kvferry.tools.replay.settings import ReplaySettings, ServedModel, parse_tier, served_model
from kvferry.tools.replay.simulation import Simulation
from kvferry.tools.replay.trace.base import Trace, TraceRequest
from support.configs import DENSE
from support.replayed import chained

UNIT = 512
"""Tokens of a unit of the small traces."""
RECURRENT = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


def model(config: dict[str, object] = DENSE, **settings: int | None) -> ServedModel:
    side = EngineSide(1, 1, "LBNHC" if config is DENSE else "BLHNC", None)
    return served_model(read_model(config, "auto", name="small"), side, KeptSettings(**settings))


def prompt(tokens: int, *units: int, at: float = 0.0, **more: object) -> TraceRequest:
    """Return a request whose units have the given content; the last may be incomplete."""
    assert len(units) == -(-tokens // UNIT)
    ids = chained(np.array(units))
    return TraceRequest(
        arrival=at,
        prompt_tokens=tokens,
        output_tokens=1,
        unit_tokens=UNIT,
        prefix_ids=ids[: tokens // UNIT],
        prompt_id=int(ids[-1]),
        **more,
    )


def simulation(
    *tiers: str, of: ServedModel | None = None, on_hit: Callable[..., None] | None = None, **settings: object
) -> Simulation:
    parsed = tuple(parse_tier(one) for one in tiers or ("host=unlimited",))
    return Simulation(of or model(), ReplaySettings(tiers=parsed, **settings), UNIT, on_hit)


class ListedTrace(Trace):
    """The requests that a function returns, anew for each reading."""

    name, length, header = "listed", 1.0, {}

    def __init__(self, requests: Callable[[], Sequence[TraceRequest]], unit_tokens: int = UNIT) -> None:
        self.unit_tokens, self._requests = unit_tokens, requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests())

    def position(self) -> float:
        return 0.0


def passes_over(requests: Callable[[], Sequence[TraceRequest]], unit_tokens: int = UNIT) -> Passes:
    """Return passes over requests, all of them in this process."""
    trace = ListedTrace(requests, unit_tokens)
    return Passes(trace, lambda: trace)


def ends_its_process() -> Sequence[TraceRequest]:
    """Stand for requests that need more memory than the machine has."""
    os.kill(os.getpid(), signal.SIGKILL)
    return []
