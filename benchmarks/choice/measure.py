"""`benchmarks choice`: the effect of the policies when one source is much slower than another.

Engines that differ only in the policy get the same requests, one after another. They store what they computed
near, in files with room for a part of it, and far, in an object store with room for all. The object store
is a real server behind a line whose width follows from the speed of the files. Before each request the
engine's prefix cache and host memory are cleared.

The two sources are connectors side by side, of which one serves a request, or tiers of one connector, which
serve parts of it together. Tiers are one source, so `first` and `weight` choose alike among them.
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
from benchmarks.choice.narrow import NarrowRelay
from benchmarks.choice.policy_engine import FAR, PolicyEngine, ReplayAnswer, Setup
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
from kvferry.tiers.objects.settings import ObjectSettings
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
    """The workload and the sources.

    Attributes:
        workload: requests to replay, with other tokens in every round.
        sources: name from `SOURCES`.
        apart: how many times as fast as the far source the near one is.
        near: share of all requested bytes that the files have room for.
        rounds: counted replays by every policy; one more comes before them.
        path: existing folder; the files made there are removed.
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
        """Capacity of the files, with room for the longest prompt."""
        longest = _LEAST_PROMPTS * self.longest
        tokens = max(self.near * self.workload.distinct_blocks * self.workload.block_tokens, longest)
        return round(tokens * token_bytes(MODEL))

    @property
    def host_bytes(self) -> int:
        """Host memory of a connector, which every chunk passes."""
        return _HOST_PROMPTS * (self.longest + self.workload.block_tokens) * token_bytes(MODEL)


@dataclass(frozen=True, slots=True)
class SourceSpeeds:
    """The speeds of both sources.

    Attributes:
        near: bytes per second of loads from files by an engine, for a prompt of middle length.
        far: bytes per second from the object store behind the line, with as many threads as an engine has.
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
class Replay:
    """One replay by one policy.

    Attributes:
        answers: answers to all requests.
    """

    answers: tuple[ReplayAnswer, ...]

    @property
    def mean(self) -> float:
        """Mean seconds until the first token."""
        return fmean(answer.seconds for answer in self.answers)

    @property
    def served(self) -> Counter[str]:
        """Tokens by the place that supplied them, "computed" for the rest."""
        found = sum((answer.served for answer in self.answers), Counter[str]())
        found["computed"] = sum(answer.tokens for answer in self.answers) - sum(found.values())
        return found

    @property
    def failed(self) -> int:
        """Number of failed loads."""
        return sum(answer.failed for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """The results of a job.

    Attributes:
        job, machine: what was measured, and where.
        probed: speeds of both sources.
        learning: replay before the rounds, by policy.
        rounds: counted replays, by policy.
    """

    job: ChoiceJob
    machine: MachineFacts
    probed: SourceSpeeds
    learning: Mapping[str, Replay]
    rounds: Mapping[str, tuple[Replay, ...]]

    def mean(self, policy: str) -> Spread:
        """Return the seconds until the first token, averaged over the requests of a round."""
        return Spread.of([replayed.mean for replayed in self.rounds[policy]])

    def ratio(self, other: str) -> Spread:
        """Return the time by policy `cost` as a multiple of another policy's in the same round."""
        pairs = zip(self.rounds["cost"], self.rounds[other], strict=True)
        return Spread.of([cost.mean / beside.mean for cost, beside in pairs])

    @property
    def reached(self) -> bool:
        """Whether `cost` is no slower than any other policy."""
        return all(self.ratio(other).median <= TARGET_RATIO for other in POLICIES if other != "cost")

    def served(self, policy: str) -> dict[str, float]:
        """Return the mean tokens of a round by place."""
        found = sum((replayed.served for replayed in self.rounds[policy]), Counter[str]())
        return {place: tokens / len(self.rounds[policy]) for place, tokens in found.items()}

    @property
    def rates(self) -> dict[str, Spread]:
        """Tokens per second over all replays, by the only place that supplied a request.

        For loads from beginning to end; for computed prompts until the first token.
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
    """Replay the workload by every policy.

    Raises:
        ConfigError: memory, folder or server cannot be had.
        TransferError: an engine died, or a source lost what it was given.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-", dir=job.path)))
        progress("writing a checkpoint")
        model = write_checkpoint(folder / "model", job.longest + 256, MODEL)
        server = stack.enter_context(object_server(folder / "objects"))
        line = stack.enter_context(NarrowRelay(server.port))
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
    return MeasuredChoice(job=job, machine=machine_facts(), probed=probed, learning=learning, rounds=rounds)


def _replay(
    job: ChoiceJob, engines: Mapping[str, PolicyEngine], server: ObjectServer, progress: Callable[[str], None]
) -> dict[str, list[Replay]]:
    """Return the replays of every policy, the first of which does not count."""
    draw = np.random.default_rng(7)
    found: dict[str, list[Replay]] = {policy: [] for policy in POLICIES}
    for number in range(job.rounds + 1):
        for which in draw.permutation(len(POLICIES)):
            policy = POLICIES[which]
            said = f"round {number} of {job.rounds}" if number else "a round that does not count"
            progress(f"{said}, policy {policy}")
            found[policy].append(Replay(engines[policy].replay(job.workload, number)))
            server.empty()
    return found


def _probe(
    job: ChoiceJob, engine: PolicyEngine, group: CanonicalGroup, options: dict[str, str], line: NarrowRelay
) -> SourceSpeeds:
    """Measure loads from files, set the line to a fraction of that speed, and measure the object store.

    The engine has policy `first`, which takes the near source.
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
        with open_queue(store, ObjectSettings.kind) as queue:
            store_all(queue, bodies, len(bodies), depth=8)
            moved = LoadMover(queue, bodies, into, len(bodies))
            # What a request costs besides its bytes, the line makes up for.
            line.bytes_per_second *= wanted / _rate(moved).median
            far = _rate(moved)
    return SourceSpeeds(near, far, line.bytes_per_second)


def _rate(loads: LoadMover) -> Spread:
    """Return bytes per second, after a move that does not count."""
    seconds = [loads.move() for _ in range(_PROBES + 1)][1:]
    return Spread.of([loads.bytes / one for one in seconds])


def _setup(job: ChoiceJob, policy: str, model: Path, folder: Path, options: dict[str, str]) -> Setup:
    """Return the set-up of a policy's engine, with folders and a path in the bucket of its own."""
    files = folder / policy
    files.mkdir()
    host = {"type": "host", "capacity": job.host_bytes}
    near = {"type": "file", "path": str(files), "capacity": job.file_bytes}
    far = {"type": "object", "url": f"s3://{BUCKET}/{policy}", "options": options}
    chunk: dict[str, Any] = {"chunk_tokens": job.workload.block_tokens}
    if job.sources == TIERS:
        connector = tiered([host, near, far], source_policy=policy, **chunk)
    else:
        each = [tiered([host, tier], **chunk) for tier in (near, far)]
        named = [{**one, "name": name} for one, name in zip(each, ("near", FAR.strip()), strict=True)]
        connector = side_by_side(named, source_policy=policy)
    longest = job.longest + 256
    cache_bytes = 2 * longest * token_bytes(MODEL) + (64 << 20)
    return Setup(model, longest, cache_bytes, connector, max(len(os.sched_getaffinity(0)) // 2, 1))
