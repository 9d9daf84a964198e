"""`benchmarks choice`: what the policies make of sources of which one is much slower than the other.

Engines that differ in nothing but the policy are asked the same requests, one after another. They keep what
they computed near, in files that have room for a part of it, and far, in an object store that has room for
all: a real server, behind a line whose width is set by how fast the files are. Before each request the engine
and its host memory have forgotten everything.

The two are connectors side by side, of which one serves a request; or tiers of one connector, which bring
parts of it together. Tiers are one source, so `first` and `weight` choose alike among them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.checkpoint import token_bytes, write_checkpoint
from benchmarks.choice.narrow import Narrow
from benchmarks.choice.policy_engine import FAR, Answer, PolicyEngine, Setup
from benchmarks.choice.workload import Workload
from benchmarks.object_server import BUCKET, ObjectServer, object_server
from benchmarks.served import side_by_side, tiered
from kvferry.bench.rank_chunks import chunk_group
from kvferry.bench.storage_chunks import ChunkBodies, LoadMover, bench_namespace, open_queue, store_all
from kvferry.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.measuring.machine import MachineFacts, machine_facts
from kvferry.measuring.simulated import read_geometry
from kvferry.measuring.spread import Spread
from kvferry.tiers.objects.tier import ObjectTier

POLICIES = ("weight", "first", "cost")
CONNECTORS, TIERS = "connectors", "tiers"
SOURCES = (CONNECTORS, TIERS)
MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 8}
"""Changes to the checkpoint: less to compute for every byte that is kept, 16 KiB per token."""

TARGET_RATIO = 1.0
"""Of the mean time to the first token by cost and by another policy, at most."""

_PROBED_CHUNKS = 16
_PROBES = 5
_SALT = 1 << 20
"""Of what is probed with: no round has it."""

_HOST_PROMPTS = 2
_LEAST_PROMPTS = 1.25
_STORE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceJob:
    """What to measure.

    Attributes:
        workload: what is asked, in every round with other tokens.
        sources: of `SOURCES`.
        apart: how many times as fast the near source is to be.
        near: the share of what is asked that files have room for.
        rounds: replays by every policy; one more comes before them that does not count.
        path: folder for what is written, which exists; it is removed again.
    """

    workload: Workload
    sources: str
    apart: float
    near: float
    rounds: int
    path: Path

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt.tokens for prompt in self.workload.prompts)

    @property
    def file_bytes(self) -> int:
        """Capacity of the files: the longest prompt fits."""
        longest = _LEAST_PROMPTS * self.longest
        tokens = max(self.near * self.workload.distinct_blocks * self.workload.block_tokens, longest)
        return round(tokens * token_bytes(MODEL))

    @property
    def host_bytes(self) -> int:
        """Host memory of a connector: every chunk passes it."""
        return _HOST_PROMPTS * (self.longest + self.workload.block_tokens) * token_bytes(MODEL)


@dataclass(frozen=True, slots=True)
class Probed:
    """How far apart the sources are.

    Attributes:
        near: bytes per second of loads from files, of a prompt of middle length, by an engine.
        far: bytes per second from the object store behind the line, by as many threads as an engine has.
        line: bytes per second that the line was set to.
    """

    near: Spread
    far: Spread
    line: float

    @property
    def apart(self) -> float:
        """How many times as fast the near source is."""
        return self.near.median / self.far.median


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay by one policy.

    Attributes:
        answers: of all requests.
    """

    answers: tuple[Answer, ...]

    @property
    def mean(self) -> float:
        """Seconds until the first token."""
        return fmean(answer.seconds for answer in self.answers)

    @property
    def served(self) -> Counter[str]:
        """Tokens by place that brought them, "computed" for the rest."""
        found = sum((answer.served for answer in self.answers), Counter[str]())
        found["computed"] = sum(answer.tokens for answer in self.answers) - sum(found.values())
        return found

    @property
    def failed(self) -> int:
        """LoadMover that failed."""
        return sum(answer.failed for answer in self.answers)


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """All results of a job.

    Attributes:
        job, machine: what was measured, and where.
        probed: how far apart the sources are.
        learning: by policy, the replay before the rounds.
        rounds: by policy.
    """

    job: ChoiceJob
    machine: MachineFacts
    probed: Probed
    learning: Mapping[str, Replayed]
    rounds: Mapping[str, tuple[Replayed, ...]]

    def mean(self, policy: str) -> Spread:
        """Seconds until the first token, on average over a round's requests."""
        return Spread.of([replayed.mean for replayed in self.rounds[policy]])

    def ratio(self, other: str) -> Spread:
        """The time by cost, of the time by another policy in the same round."""
        pairs = zip(self.rounds["cost"], self.rounds[other], strict=True)
        return Spread.of([cost.mean / beside.mean for cost, beside in pairs])

    @property
    def reached(self) -> bool:
        """Cost is no slower than any other."""
        return all(self.ratio(other).median <= TARGET_RATIO for other in POLICIES if other != "cost")

    def served(self, policy: str) -> dict[str, float]:
        """Tokens of a round by place, on average."""
        found = sum((replayed.served for replayed in self.rounds[policy]), Counter[str]())
        return {place: tokens / len(self.rounds[policy]) for place, tokens in found.items()}

    @property
    def rates(self) -> dict[str, Spread]:
        """Tokens per second in the replays of all policies, by the only place that a request's came from.

        Of loads, from their beginning to their end; of what was computed, until the first token.
        """
        found = dict[str, list[float]]()
        answers = [a for rounds in self.rounds.values() for one in rounds for a in one.answers]
        for answer in answers:
            if not answer.loads and not answer.failed:
                found.setdefault("computed", []).append(answer.tokens / answer.seconds)
            for load in answer.loads:
                if len(load.parts) == 1:
                    ((place, tokens),) = load.parts.items()
                    found.setdefault(place, []).append(tokens / load.seconds)
        return {place: Spread.of(rates) for place, rates in sorted(found.items())}


def measure(job: ChoiceJob, progress: Callable[[str], None]) -> MeasuredChoice:
    """Do a job.

    Raises:
        ConfigError: memory, folder or server cannot be had.
        TransferError: an engine died, or a source did not give what it was given.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=job.path)))
        progress("writing a checkpoint")
        model = write_checkpoint(folder / "model", job.longest + 256, MODEL)
        server = stack.enter_context(object_server(folder / "objects"))
        line = stack.enter_context(Narrow(server.port))
        options = server.options(line.port)
        group = chunk_group(read_geometry(str(model)), job.workload.block_tokens)
        progress(f"starting {len(POLICIES)} engines")
        engines = {
            policy: stack.enter_context(PolicyEngine(policy, _setup(job, policy, model, folder, options)))
            for policy in POLICIES
        }
        for engine in engines.values():
            engine.wait()
        progress("measuring both sources")
        probed = _probe(job, engines["first"], group, options, line)
        server.empty()
        found = _replay(job, engines, server, progress)
    learning = {policy: replays[0] for policy, replays in found.items()}
    rounds = {policy: tuple(replays[1:]) for policy, replays in found.items()}
    return MeasuredChoice(job, machine_facts(), probed, learning, rounds)


def _replay(
    job: ChoiceJob, engines: Mapping[str, PolicyEngine], server: ObjectServer, progress: Callable[[str], None]
) -> dict[str, list[Replayed]]:
    """Every policy's replays, the first of which does not count."""
    draw = np.random.default_rng(7)
    found: dict[str, list[Replayed]] = {policy: [] for policy in POLICIES}
    for number in range(job.rounds + 1):
        for which in draw.permutation(len(POLICIES)):
            policy = POLICIES[which]
            said = f"round {number} of {job.rounds}" if number else "a round that does not count"
            progress(f"{said}, policy {policy}")
            found[policy].append(Replayed(engines[policy].replay(job.workload, number)))
            server.empty()
    return found


def _probe(
    job: ChoiceJob, engine: PolicyEngine, group: CanonicalGroup, options: dict[str, str], line: Narrow
) -> Probed:
    """Load prompts from files into an engine; make the line so much slower, and read from the object store.

    The engine is that of `first`, which takes what is near.
    """
    tokens = job.workload.block_tokens
    prompt = sorted(job.workload.prompts, key=lambda one: one.tokens)[len(job.workload.prompts) // 2]
    twice = Workload("a prompt, twice", tokens, (prompt, prompt))
    loads = [load for salt in range(_PROBES) for load in engine.replay(twice, _SALT + salt)[1].loads]
    if len(loads) < _PROBES:
        raise TransferError(
            f"near source: {len(loads)} of {_PROBES} prompts came from it: please report this"
        )
    near = Spread.of([sum(load.parts.values()) * token_bytes(MODEL) / load.seconds for load in loads])
    wanted = line.bytes_per_second = near.median / job.apart
    with (
        ChunkBodies(group, tokens, _PROBED_CHUNKS) as bodies,
        ChunkBodies(group, tokens, _PROBED_CHUNKS) as into,
    ):
        store = ObjectTier(
            f"s3://{BUCKET}/probe", bench_namespace(bodies.group), options, timeout_seconds=_STORE_SECONDS
        )
        with open_queue(store) as queue:
            store_all(queue, bodies, len(bodies), depth=8)
            moved = LoadMover(queue, bodies, into, len(bodies))
            # What a request costs besides its bytes, the line makes up for.
            line.bytes_per_second *= wanted / _rate(moved).median
            far = _rate(moved)
    return Probed(near, far, line.bytes_per_second)


def _rate(loads: LoadMover) -> Spread:
    """Bytes per second, after once that does not count."""
    seconds = [loads.move() for _ in range(_PROBES + 1)][1:]
    return Spread.of([loads.bytes / one for one in seconds])


def _setup(job: ChoiceJob, policy: str, model: Path, folder: Path, options: dict[str, str]) -> Setup:
    """An engine of a policy, with folders and a path in the bucket of its own."""
    files = folder / policy
    files.mkdir()
    host = {"type": "host", "capacity": job.host_bytes}
    near = {"type": "file", "path": str(files), "capacity": job.file_bytes}
    far = {"type": "object", "url": f"s3://{BUCKET}/{policy}", "options": options}
    chunk: dict[str, Any] = {"chunk_tokens": job.workload.block_tokens}
    if job.sources == TIERS:
        connector = tiered([host, near, far], policy=policy, **chunk)
    else:
        each = [tiered([host, tier], **chunk) for tier in (near, far)]
        named = [{**one, "name": name} for one, name in zip(each, ("near", FAR.strip()), strict=True)]
        connector = side_by_side(named, policy=policy)
    longest = job.longest + 256
    cache_bytes = 2 * longest * token_bytes(MODEL) + (64 << 20)
    return Setup(model, longest, cache_bytes, connector, max(len(os.sched_getaffinity(0)) // 2, 1))
