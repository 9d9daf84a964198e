"""`kvferry bench offload`: what keeping and fetching chunks reaches here, beside what stands under it.

Five parts, each by itself: how fast chunks move to and from every tier (`tiers`), how long a scheduler looks
for a prompt's chunks (`lookup`) and asks five sources for it (`asking`), what tiers cost an engine whose
requests have nothing in them (`hooks`), and when a prompt's first token comes if its chunks are there
(`ttft`). The last two start vLLM in this process, `asking` loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench import engine_parts, lookup, tier_speeds
from kvferry.bench.asking import Asking
from kvferry.bench.chunks import CHUNK_TOKENS, chunk_group
from kvferry.bench.contest import Speed
from kvferry.bench.engine_parts import HOOKS, TTFT, Asked
from kvferry.bench.first_token import FirstToken
from kvferry.bench.lookup import LookUp
from kvferry.bench.tier_hooks import HookCost
from kvferry.bench.transfer import Machine, machine
from kvferry.geometry.models import ModelReading
from kvferry.plan.side import Side

PARTS = ("tiers", "lookup", "asking", HOOKS, TTFT)
DEFAULT_PARTS = ("tiers", "lookup")
ASKED_FOR = 10
"""Times for every round of other parts that sources are asked: few would say nothing of p99."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        reading: whose KV cache, of a model whose layers are alike.
        parts: of `PARTS`.
        sides: engines that chunks come from and go to, each measured by itself.
        depths: chunks that are under way at a time.
        repeats: rounds; one more comes before them that does not count.
        path: folder for the file tier's files, which exists; they are removed again.
        url: of object storage, None to leave it out.
        stored: chunks among which a prompt's are looked for.
        looked_for: tokens of the prompt that is looked for, and of those that are asked for.
        asked: of an engine, for the parts that start one.
    """

    reading: ModelReading
    parts: tuple[str, ...]
    sides: tuple[Side, ...]
    depths: tuple[int, ...]
    repeats: int
    path: Path
    url: str | None = None
    stored: int = 1_000_000
    looked_for: int = 131_072
    asked: Asked = field(default_factory=Asked)


@dataclass(frozen=True, slots=True)
class Measured:
    """All results of a job.

    Attributes:
        job, machine: what was measured, and where.
        chunk_tokens, chunk_bytes: of a chunk of the model.
        speeds: of every tier, way and depth.
        lookup, asking, hooks, first_token: None where they are no part of the job.
    """

    job: Job
    machine: Machine
    chunk_tokens: int
    chunk_bytes: int
    speeds: tuple[Speed, ...]
    lookup: LookUp | None = None
    asking: Asking | None = None
    hooks: HookCost | None = None
    first_token: FirstToken | None = None


def measure(job: Job, progress: Callable[[str], None]) -> Measured:
    """Do a job.

    Raises:
        ConfigError: memory, folder or storage cannot be used.
        TransferError: a chunk did not come back as it was.
    """
    group = chunk_group(job.reading)
    speeds: tuple[Speed, ...] = ()
    if "tiers" in job.parts:
        speeds = tier_speeds.measure(
            job.reading, job.sides, job.depths, job.repeats, job.path, job.url, progress
        )
    found = None
    if "lookup" in job.parts:
        found = lookup.measure(group, job.looked_for, job.stored, job.repeats, progress)
    asking = None
    if "asking" in job.parts:
        from kvferry.bench import ask_rounds  # noqa: PLC0415 - loads vLLM, and only this part needs it

        asking = ask_rounds.measure(job.path, job.looked_for, ASKED_FOR * job.repeats, progress)
    hooks, first = None, None
    if wanted := tuple(part for part in (HOOKS, TTFT) if part in job.parts):
        hooks, first = engine_parts.measure(job.asked, wanted, job.path, progress)
    return Measured(job, machine(), CHUNK_TOKENS, group.chunk_bytes, speeds, found, asking, hooks, first)
