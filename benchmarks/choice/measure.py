"""`benchmarks choice`: compare the policies for choosing a source if one source is much slower than another.

Engines that differ only in the policy get the same requests, one after another. They store the KV that they
compute in two places. The near source is files, with room for a part of it. The far source is an object
store, with room for all of it. The object store is a real server behind a relay that limits its speed to a
fraction of the files' speed. Before each request, the engine's prefix cache and host memory are cleared.

The two sources are either two connectors in one engine, of which one serves a request, or tiers of one
connector, which serve a request together. Tiers are one source, so the policies `first` and `weight` are
equivalent for them.
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
from kvferry.common.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tools.bench.movers import CallMover
from kvferry.tools.bench.rank_chunks import chunk_group
from kvferry.tools.bench.storage_chunks import (
    RandomChunks,
    bench_namespace,
    load_mover,
    open_queue,
    store_all,
)
from kvferry.tools.measuring.rounds import MachineFacts, Spread, machine_facts
from kvferry.tools.measuring.simulated import read_geometry

POLICIES = ("weight", "first", "cost")
CONNECTORS, TIERS = "connectors", "tiers"
SOURCES = (CONNECTORS, TIERS)
MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 8}
"""Changes to the checkpoint: less computation per byte of KV cache, and 16 KiB of KV cache per token."""

TARGET_RATIO = 1.0
"""Largest ratio of the mean time to first token with policy `cost` to that with another policy."""

_PROBED_CHUNKS = 16
_PROBES = 5
_SALT = 1 << 20
"""First salt of the prompts that measure the sources' speeds. No round uses it."""

_HOST_PROMPTS = 2
_LEAST_PROMPTS = 1.25
_STORE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceJob:
    """The workload and the sources to measure.

    Attributes:
        workload: requests to replay, with different tokens in every round.
        sources: kind of the sources, one of `SOURCES`.
        apart: speed of the near source as a multiple of the far source's.
        near: share of the workload's distinct bytes for which the files have room.
        rounds: number of counted replays with every policy. Another replay before them is not counted.
        path: existing folder. The files created there are removed.
    """

    workload: Workload
    sources: str
    apart: float
    near: float
    rounds: int
    path: Path

    @property
    def longest(self) -> int:
        """Return the length of the longest prompt, in tokens."""
        return max(prompt.tokens for prompt in self.workload.prompts)

    @property
    def file_bytes(self) -> int:
        """Return the capacity of the files in bytes, at least enough for the longest prompt."""
        longest = _LEAST_PROMPTS * self.longest
        tokens = max(self.near * self.workload.distinct_blocks * self.workload.block_tokens, longest)
        return round(tokens * token_bytes(MODEL))

    @property
    def host_bytes(self) -> int:
        """Return the size of a connector's host memory in bytes. Every chunk passes through it."""
        return _HOST_PROMPTS * (self.longest + self.workload.block_tokens) * token_bytes(MODEL)


@dataclass(frozen=True, slots=True)
class SourceSpeeds:
    """The measured speeds of both sources.

    Attributes:
        near: speed of an engine's loads from files, for a prompt of median length, in bytes per second.
        far: speed of loads from the object store behind the relay, with as many threads as in an engine, in
            bytes per second.
        line: limit of the relay, in bytes per second.
    """

    near: Spread
    far: Spread
    line: float

    @property
    def apart(self) -> float:
        """Return the speed of the near source as a multiple of the far source's."""
        return self.near.median / self.far.median


@dataclass(frozen=True, slots=True)
class Replay:
    """The results of one replay of the workload with one policy.

    Attributes:
        answers: results of all requests, in their order.
    """

    answers: tuple[ReplayAnswer, ...]

    @property
    def mean(self) -> float:
        """Return the mean time to first token, in seconds."""
        return fmean(answer.seconds for answer in self.answers)

    @property
    def served(self) -> Counter[str]:
        """Return the number of tokens by the place from which they were loaded, or "computed"."""
        found = sum((answer.served for answer in self.answers), Counter[str]())
        found["computed"] = sum(answer.tokens for answer in self.answers) - sum(found.values())
        return found

    @property
    def failed(self) -> int:
        """Return the number of failed loads."""
        return sum(answer.failed for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChoice:
    """The results of the benchmark.

    Attributes:
        job: measured workload and sources.
        machine: machine of the measurement.
        probed: speeds of both sources.
        learning: first replay of each policy, in which it learns the speeds and which is not counted.
        rounds: counted replays of each policy.
    """

    job: ChoiceJob
    machine: MachineFacts
    probed: SourceSpeeds
    learning: Mapping[str, Replay]
    rounds: Mapping[str, tuple[Replay, ...]]

    def mean(self, policy: str) -> Spread:
        """Return the spread over rounds of a round's mean time to first token, in seconds."""
        return Spread.of([replayed.mean for replayed in self.rounds[policy]])

    def ratio(self, other: str) -> Spread:
        """Return the mean time to first token with `cost` as a multiple of that with `other`, per round."""
        pairs = zip(self.rounds["cost"], self.rounds[other], strict=True)
        return Spread.of([cost.mean / beside.mean for cost, beside in pairs])

    @property
    def reached(self) -> bool:
        """Return whether policy `cost` is not slower than any other policy."""
        return all(self.ratio(other).median <= TARGET_RATIO for other in POLICIES if other != "cost")

    def served(self, policy: str) -> dict[str, float]:
        """Return the mean number of tokens per round, by the place they were loaded from or "computed"."""
        found = sum((replayed.served for replayed in self.rounds[policy]), Counter[str]())
        return {place: tokens / len(self.rounds[policy]) for place, tokens in found.items()}

    @property
    def rates(self) -> dict[str, Spread]:
        """Return the speed of each place in tokens per second, over all counted replays.

        Only loads from a single place count, with the time from their beginning to their end. The speed of
        "computed" is that of prompts that were computed as a whole, with the time to first token.
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
    """Replay the workload with every policy, and return the results.

    Args:
        job: workload and sources.
        progress: function that is called with a line of text before each step.

    Raises:
        ConfigError: memory, the folder or the server cannot be used.
        TransferError: an engine died, or a source lost chunks that were stored.
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
    """Replay the workload with every policy in every round. Return the replays; the first is not counted."""
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
    """Measure loads from files, limit the relay to a fraction of that speed, and measure the object store.

    Args:
        job: workload and sources.
        engine: engine with the policy `first`, which chooses the near source.
        group: format of the chunks.
        options: options of the object tier.
        line: relay in front of the object store. Its limit is changed.

    Raises:
        TransferError: a prompt was not loaded from the files.
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
        RandomChunks(group, tokens, _PROBED_CHUNKS) as chunks,
        RandomChunks(group, tokens, _PROBED_CHUNKS) as into,
    ):
        store = ObjectTier(
            f"s3://{BUCKET}/probe", bench_namespace(chunks.group), options, timeout_seconds=_STORE_SECONDS
        )
        with open_queue(store, ObjectSettings.kind) as queue:
            store_all(queue, chunks, len(chunks), depth=8)
            moved = load_mover(queue, chunks, into, len(chunks))
            # Raise the limit to make up for the time per request that does not depend on its bytes.
            line.bytes_per_second *= wanted / _rate(moved).median
            far = _rate(moved)
    return SourceSpeeds(near, far, line.bytes_per_second)


def _rate(loads: CallMover) -> Spread:
    """Return the speed of repeated loads in bytes per second. A load before them is not counted."""
    seconds = [loads.move() for _ in range(_PROBES + 1)][1:]
    return Spread.of([loads.bytes / one for one in seconds])


def _setup(job: ChoiceJob, policy: str, model: Path, folder: Path, options: dict[str, str]) -> Setup:
    """Return the configuration of a policy's engine, with a separate folder and path in the bucket."""
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
