"""Case: requests that have nothing to do in a step.

The scheduler half is the real one, with peers and host memory, without workers. Each figure is the time of a
step that computes one token of another request:

- *wait*: a step, while requests whose KV will be offered wait in the engine's queue. One lease is held.
- *turns*: a step, while finished requests are kept for the next turns of their conversations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks.no_blocks import NoBlocks
from benchmarks.offload.sources import model
from benchmarks.scale.case import Case, Figures
from benchmarks.scale.result import Measure
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.engine import CacheGroup, EngineFacts, PlainRequest, PlainStep
from kvferry.connector.messages import WorkerInfo
from kvferry.connector.scheduler import SchedulerHalf
from kvferry.geometry import GroupKind
from kvferry.keys.namespace import Namespace
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.messages import Facts, RankCard
from kvferry.transport.security import read_keys

BLOCK_TOKENS, _BLOCKS = 16, 1 << 17
_PROMPT_TOKENS, _TURN_TOKENS, _STEPS = 20, 272, 100
_OFFERED = {"do_remote_decode": True, "do_remote_prefill": False}


class _Pool(NoBlocks):
    """A block pool whose blocks are all in use."""

    blocks = tuple(
        [SimpleNamespace(block_id=number, is_null=number == 0, block_hash=None) for number in range(_BLOCKS)]
    )


class _Engine:
    """An engine that computes nothing, and its scheduler half."""

    def __init__(self, **settings: Any) -> None:
        config = ConnectorConfig(
            host="127.0.0.1", tiers=[{"type": "host", "capacity": "64MiB"}], transfer=True, **settings
        )
        shape = EngineShape(1, (1,), BLOCK_TOKENS, "LBNHC", _BLOCKS)
        (rank,) = lay_out(model("steps", (GroupKind.FULL,)), shape)
        facts = EngineFacts(
            engine_id="e",
            groups=(CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=BLOCK_TOKENS),),
            num_blocks=_BLOCKS,
            longest_request=1 << 17,
            steps_in_flight=2,
            tokens_in_flight=4096,
            step_tokens=2048,
        )
        card = RankCard(rank, b"", 4096, 64, 1)
        key = read_keys(config.secret_file).fingerprint
        self.half = SchedulerHalf(
            facts,
            config,
            [WorkerInfo(geometry=rank, card=card, key=key)],
            _Pool(),
            facts=lambda incarnation: Facts("e", incarnation, "kvferry bench", {}),
            namespace=lambda _: _NAMESPACE,
        )
        self._number = 0

    def add(self, tokens: int, params: Any = None) -> PlainRequest:
        """Return a new request, whose prompt no other request has."""
        self._number += 1
        prompt = [self._number % 50_000, self._number // 50_000, *range(tokens - 2)]
        one = PlainRequest(request_id=f"r{self._number}", prompt_token_ids=prompt, kv_transfer_params=params)
        self.half.on_new_request(one)
        return one

    def run(self, tokens: dict[str, int]) -> None:
        """Schedule a step of these requests, and take its output."""
        self.half.orders(PlainStep(tokens=tokens))
        self.half.step_done()

    def end(self, one: PlainRequest) -> None:
        """End a request whose prompt was computed."""
        one.is_complete, one.num_computed_tokens = True, one.num_tokens
        self.half.finished(one, _TABLE)

    def time_step(self) -> float:
        """Return the seconds of a step, the median of many."""
        seconds = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            self.run({"other": 1})
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


_TABLE = ([*range(1, 1 + _TURN_TOKENS // BLOCK_TOKENS)],)


_NAMESPACE = Namespace.of(
    weights="0" * 8, model={}, dtype="bfloat16", kv_dtype="auto", scales={}, form=["bench"], name="bench"
)


@contextmanager
def _open(**settings: Any) -> Iterator[_Engine]:
    engine = _Engine(**settings)
    try:
        yield engine
    finally:
        engine.half.shutdown()


def _waiting(size: int) -> float:
    with _open() as engine:
        engine.end(engine.add(_PROMPT_TOKENS, _OFFERED))
        for _ in range(size):
            engine.add(_PROMPT_TOKENS, _OFFERED)
        return engine.time_step()


def _turns(size: int) -> float:
    with _open(turn_seconds=600.0, turn_share=1.0) as engine:
        for _ in range(size):
            engine.end(engine.add(_TURN_TOKENS))
        for _ in range(4):
            engine.run({"other": 1})
        return engine.time_step()


def _round(size: int) -> Figures:
    return {"wait": _waiting(size), "turns": _turns(size)}


@contextmanager
def _prepare(size: int) -> Iterator[Callable[[], Figures]]:
    yield partial(_round, size)


def _nothing(size: int) -> Figures:
    del size
    return {}


CASE = Case(
    name="steps",
    noun="idle requests",
    sizes=(10, 100, 1_000, 6_000),
    measures=(
        Measure(name="wait", label="a step while {n} prompts to be offered wait", per="step", unit="seconds"),
        Measure(name="turns", label="a step while {n} turns are kept", per="step", unit="seconds"),
    ),
    prepare=_prepare,
    once=_nothing,
)
