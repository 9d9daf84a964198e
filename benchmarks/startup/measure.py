"""Start and stop engines with each connector in turn, each in a fresh process.

In each round every variant starts once, and the order rotates from round to round. The first round is not
counted: it reads files into the page cache, and compiles Python's modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.engine_process import EngineProcess
from benchmarks.handover.model import HandoverModel, write_model
from benchmarks.order import rotated
from benchmarks.startup.engine import ReadyEngine, StartedEngine, StartSetup
from benchmarks.startup.variants import VARIANTS
from kvferry.tools.serving.devices import free_ports

_LONGEST = 4096
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """The start and the stop of an engine.

    Attributes:
        ready: the start, as measured inside the process.
        stop_seconds: time from the order to stop until the process has ended.
    """

    ready: ReadyEngine
    stop_seconds: float

    @property
    def seconds(self) -> float:
        """Time from before the connector's modules are imported until the engine is ready."""
        return self.ready.import_seconds + self.ready.engine_seconds


Round = dict[str, Start]
"""The starts of one round, by variant."""


def measure(
    model: HandoverModel,
    rounds: int,
    cache_bytes: int,
    *,
    folder: Path,
    progress: Callable[[str], None],
) -> tuple[Round, ...]:
    """Start every variant once in each round; return the counted rounds.

    Args:
        model: family of the checkpoint.
        rounds: number of counted rounds.
        cache_bytes: size of the KV cache, in bytes.
        folder: folder for the checkpoint and the file tier.
        progress: function that is called with a line of text before each start.

    Raises:
        TransferError: an engine does not start or does not answer.
    """
    progress(f"{model.name}: writing the checkpoint")
    files = folder / "tier"
    files.mkdir(exist_ok=True)
    common = StartSetup(
        model=write_model(model, folder / model.name, _LONGEST), variant="", port=0, longest=_LONGEST,
        cache_bytes=cache_bytes, files=files, engine=dict(model.engine),
    )  # fmt: skip
    return in_rounds(rounds, lambda variant: start_and_stop(replace(common, variant=variant)), progress)


def in_rounds(
    rounds: int, start: Callable[[str], T], progress: Callable[[str], None]
) -> tuple[dict[str, T], ...]:
    """Call a function for every variant in each round; return the results of all rounds but the first.

    Args:
        rounds: number of counted rounds.
        start: function to call with the name of a variant.
        progress: function that is called with a line of text before each call.
    """
    found = []
    for number in range(rounds + 1):
        results = {}
        for variant in rotated(VARIANTS, number):
            progress(f"round {number} of {rounds}: {variant}" if number else f"warm-up: {variant}")
            results[variant] = start(variant)
        found.append({variant: results[variant] for variant in VARIANTS})
    return tuple(found[1:])


def start_and_stop(setup: StartSetup) -> Start:
    """Start an engine in a fresh process, and end the process.

    Args:
        setup: configuration of the engine, without the port.

    Raises:
        TransferError: the engine does not start or does not answer.
    """
    (port,) = free_ports(1)
    with EngineProcess(setup.variant, StartedEngine, replace(setup, port=port)) as engine:
        engine.wait_ready()
        ready = engine.call("start")
        stopping = time.perf_counter()
    return Start(ready, time.perf_counter() - stopping)
