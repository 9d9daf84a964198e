"""`benchmarks offload`: measure the time that tiers cost a scheduler and an engine, and the time they save.

- ``lookup``: time to look up a long prompt's chunks in a large index.
- ``asking``: time to query a peer and four tiers for a prompt; loads vLLM.
- ``hooks``: time inside the connector's hooks per step of an engine; starts vLLM in this process.
- ``ttft``: time to first token of a prompt that is loaded from each tier; starts vLLM in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.offload import engine_parts, lookup
from benchmarks.offload.asking import AskResults
from benchmarks.offload.engine_parts import HOOKS, TTFT, EngineRequests
from benchmarks.offload.first_token import FirstToken
from benchmarks.offload.lookup import LookUpResults
from benchmarks.offload.tier_hooks import HookCost
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, chunk_group
from kvferry.tools.measuring.rounds import MachineFacts, machine_facts
from kvferry.tools.models import ModelReading

PARTS = ("lookup", "asking", HOOKS, TTFT)
ASKED_FOR = 10
"""Number of requests of ``asking`` per round of the other parts. With few, p99 would be meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadJob:
    """The parts and settings to measure.

    Attributes:
        reading: description of the KV cache of a model whose layers are all alike, for ``lookup``.
        parts: names of the parts, from `PARTS`.
        repeats: number of counted rounds. Another round before them is not counted.
        path: existing folder for chunk files. The files created there are removed.
        stored: number of chunks in the index for ``lookup``.
        prompt_tokens: length of the prompt for ``lookup`` and ``asking``, in tokens.
        asked: requests to the engine, for ``hooks`` and ``ttft``.
    """

    reading: ModelReading
    parts: tuple[str, ...]
    repeats: int
    path: Path
    stored: int = 1_000_000
    prompt_tokens: int = 131_072
    asked: EngineRequests = field(default_factory=EngineRequests)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOffload:
    """The results of the benchmark.

    Attributes:
        job: measured parts and settings.
        machine: machine of the measurement.
        chunk_tokens, chunk_bytes: size of one chunk of the model, in tokens and in bytes.
        lookup, asking, hooks, first_token: results of each part; None if the part was not measured.
    """

    job: OffloadJob
    machine: MachineFacts
    chunk_tokens: int
    chunk_bytes: int
    lookup: LookUpResults | None = None
    asking: AskResults | None = None
    hooks: HookCost | None = None
    first_token: FirstToken | None = None


def measure(job: OffloadJob, progress: Callable[[str], None]) -> MeasuredOffload:
    """Measure every part of the job, and return the results.

    Args:
        job: parts and settings.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: memory or the folder cannot be used.
        TransferError: an engine or a tier did not answer, or gave a wrong answer.
    """
    group = chunk_group(job.reading)
    looked_up = None
    if "lookup" in job.parts:
        looked_up = lookup.measure(group, job.prompt_tokens, job.stored, job.repeats, progress)
    asking = None
    if "asking" in job.parts:
        from benchmarks.offload import ask_rounds  # noqa: PLC0415 - loads vLLM, and only this part needs it

        asking = ask_rounds.measure(job.path, job.prompt_tokens, ASKED_FOR * job.repeats, progress)
    hooks, first = None, None
    if engine_wanted := tuple(part for part in (HOOKS, TTFT) if part in job.parts):
        hooks, first = engine_parts.measure(job.asked, engine_wanted, job.path, progress)
    return MeasuredOffload(
        job=job,
        machine=machine_facts(),
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=group.chunk_bytes,
        lookup=looked_up,
        asking=asking,
        hooks=hooks,
        first_token=first,
    )
