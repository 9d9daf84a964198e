"""`kvferry replay`: whether tiers are worth it, and how large, by simulating engines on a request trace."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli import plan_options, replay_options as opt
from kvferry.cli.options import check_folder, write_file
from kvferry.cli.output import INTERRUPTED
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.replay.engine import Hit
    from kvferry.replay.model import ServedModel
    from kvferry.replay.recorded_engine import RecordedEngine
    from kvferry.replay.report import Outcome
    from kvferry.replay.settings import ReplaySettings, TierSetting
    from kvferry.replay.sizing import SizeQuestion
    from kvferry.replay.trace.base import Trace
    from kvferry.replay.trace.request import TraceRequest

_STEP_TOKENS = 8192

TraceFile = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="Trace: JSON lines, CSV, or one that an engine recorded; - for standard input. Or a workload of "
        "conversations, such as users=500,turns=6.",
    ),
]


def replay(
    trace: TraceFile,
    model: opt.Model,
    tier: opt.Tiers = None,
    engine_blocks: opt.EngineBlocks = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    policy: opt.Policy = "lru",
    prefill_tokens_per_second: opt.PrefillSpeed = 0.0,
    bandwidth: opt.Bandwidth = None,
    engines: opt.Engines = 1,
    route: opt.RouteOption = "prefix",
    tp: opt.Tp = 1,
    block_size: opt.BlockSize = None,
    dtype: opt.Dtype = "auto",
    step_tokens: opt.StepTokens = None,
    retention: opt.Retention = "0",
    chunk_tokens: opt.ChunkTokens = None,
    snapshot_tokens: opt.SnapshotTokens = None,
    first_snapshot_tokens: plan_options.FirstSnapshot = None,
    unit_tokens: opt.UnitTokens = None,
    skip: opt.Skip = 0,
    seed: opt.Seed = 0,
    curve: opt.Curve = False,
    target_hit: opt.TargetHit = None,
    disk_writes_per_day: opt.DiskWrites = None,
    requests: opt.Requests = None,
    as_json: opt.Json = False,
    html: opt.Html = None,
) -> None:
    """Predict what tiers save on a request trace, and their size.

    Simulates engines and their tiers with the code that looks chunks up, chooses what to store and evicts in
    a real engine. Nothing is run, and no weights are read. The numbers of a workload and their defaults:
    users=1000, requests-per-second=10, shared-prompt-tokens=1000, turns=5, prompt-tokens=500,
    output-tokens=300 (means), hours=0.5, seed=0.
    """
    if target_hit is None and disk_writes_per_day is not None:
        raise ConfigError(
            "--disk-writes-per-day is about the disk of --target-hit; give both, or leave it out"
        )
    from kvferry.replay.pool import block_pool
    from kvferry.replay.recorded_engine import recorded_engine
    from kvferry.replay.settings import ReplaySettings, parse_tier
    from kvferry.replay.sizing import SizeQuestion

    check_folder(html)
    from kvferry.replay.trace.open import open_trace

    asked_by = "--curve" if target_hit is None else "--target-hit"
    several = curve or target_hit is not None
    found = open_for_curve(trace, unit_tokens, asked_by) if several else open_trace(trace, unit_tokens)
    recorded = recorded_engine(found.name, found.header)
    served = served_model_of(
        model,
        recorded,
        dtype=dtype,
        tp=tp,
        block_size=block_size,
        step_tokens=step_tokens,
        retention=retention,
        chunk_tokens=chunk_tokens,
        snapshot_tokens=snapshot_tokens,
        first_snapshot_tokens=first_snapshot_tokens,
    )
    tiers = with_bandwidth([parse_tier(one) for one in tier or ["host=unlimited"]], bandwidth)
    settings = ReplaySettings(
        tiers=tuple(tiers),
        engines=engines,
        pool=block_pool(served, engine_blocks, recorded.num_blocks, kv_cache_memory),
        policy=policy,
        route=route,  # type: ignore[arg-type]  # checked by the class
        prefill_tokens_per_second=prefill_tokens_per_second,
        seed=seed,
        skip=skip,
    )
    if target_hit is not None:
        if bandwidth or requests or engines > 1 or len(tiers) > 1:
            raise ConfigError(
                "--target-hit looks for the size of one engine's tiers; leave out --bandwidth, --requests, "
                "--engines and any --tier but host=SIZE"
            )
        host = tiers[0].capacity_bytes if tier else None
        _size(
            found,
            served,
            settings,
            SizeQuestion(target_hit, host, 1.0 if disk_writes_per_day is None else disk_writes_per_day),
            html,
            as_json=as_json,
        )
        return
    outcome = _replay(found, served, settings, requests, curve=curve)
    print_notes(found)
    if html is not None:
        from kvferry.replay.page import page

        write_file(html, page(outcome))
    if as_json:
        from kvferry.replay.report import as_json as values

        print(json.dumps(values(outcome)))
    else:
        from kvferry.replay.show import show
        from kvferry.report import Report

        show(outcome, Report.to_stdout())
    if not outcome.complete:
        raise SystemExit(INTERRUPTED)


def _size(
    trace: Trace,
    model: ServedModel,
    settings: ReplaySettings,
    question: SizeQuestion,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the smallest tiers that reach a hit rate.

    Args:
        trace: trace that can be read several times.
        model: model and settings of the engine.
        settings: settings of the replays, except for the tiers.
        question: hit rate to reach.
        html: HTML file to write; None for none.
        as_json: True to print JSON.
    """
    from kvferry.cli.progress import progress
    from kvferry.replay.show_size import show_size, size_as_json
    from kvferry.replay.sizing import size
    from kvferry.report import Report

    found = size(partial(progress, trace), model, settings, question, trace.unit_tokens)
    print_notes(trace)
    if html is not None:
        from kvferry.replay.page import size_page

        write_file(html, size_page(found, trace.name))
    if as_json:
        print(json.dumps(size_as_json(found)))
    else:
        show_size(found, Report.to_stdout())


def served_model_of(
    model: str,
    recorded: RecordedEngine,
    *,
    dtype: str,
    tp: int,
    block_size: int | None,
    step_tokens: int | None,
    retention: str,
    chunk_tokens: int | None,
    snapshot_tokens: int | None,
    first_snapshot_tokens: int | None,
) -> ServedModel:
    """Return the model and the engine settings of a replay, from the values of the options.

    The settings of the engine that recorded the trace replace options that are None.

    Raises:
        KVFerryError: the model is not known, or an engine cannot have these settings.
    """
    from kvferry.geometry.models import read_model
    from kvferry.plan.find import find_config
    from kvferry.plan.kept import KeptSettings
    from kvferry.plan.side import EngineSide, resolve_layout
    from kvferry.plan.snapshots import parse_retention
    from kvferry.replay.model import served_model
    from kvferry.replay.recorded_engine import with_blocks

    name, config = find_config(model)
    reading = read_model(config, dtype, name=name, draft=False)
    side = EngineSide(tp, 1, resolve_layout("auto", reading), block_size or recorded.common_block)
    kept = KeptSettings(
        step_tokens or recorded.step_tokens or _STEP_TOKENS,
        parse_retention(retention),
        chunk_tokens or recorded.chunk_tokens,
        snapshot_tokens or (None if chunk_tokens else recorded.snapshot_tokens),
        first_snapshot_tokens=(
            recorded.first_snapshot_tokens if first_snapshot_tokens is None else first_snapshot_tokens
        ),
    )
    served = served_model(reading, side, kept)
    known = None if block_size else recorded.common_block
    return with_blocks(served, known) if known else served


def print_notes(trace: Trace) -> None:
    """Print on standard error what reading a trace changed or assumed."""
    for note in trace.notes():
        print(f"kvferry: {trace.name}: {note}", file=sys.stderr)


def with_bandwidth(tiers: list[TierSetting], texts: list[str] | None) -> list[TierSetting]:
    """Return tiers with the speeds that the user gave.

    Args:
        tiers: tiers of the replay.
        texts: values of ``--bandwidth``, as in ``file=6``: a kind of tier and its speed in GB/s.

    Raises:
        ConfigError: a value names no tier, or no speed above 0.
    """
    for text in texts or []:
        kind, _, number = text.partition("=")
        try:
            speed = float(number) * 1e9
        except ValueError:
            speed = 0.0
        if kind not in [tier.kind for tier in tiers] or not 0 < speed < float("inf"):
            raise ConfigError(
                f"--bandwidth {text!r}; write the kind of a --tier and GB/s above 0, as in file=6"
            )
        tiers = [replace(tier, bytes_per_second=speed) if tier.kind == kind else tier for tier in tiers]
    return tiers


def open_for_curve(path: str, unit_tokens: int | None, asked_by: str) -> Trace:
    """Open a trace from which a hit-rate curve is computed, in several passes.

    Args:
        path: path of the trace, or ``-`` for standard input.
        unit_tokens: number of tokens per unit, where the trace does not say it.
        asked_by: command or option that computes the curve, for the error message.

    Raises:
        ConfigError: the file is no trace, it can be read only once, or it has only lengths.
    """
    from kvferry.replay.trace.base import ONLY_LENGTHS
    from kvferry.replay.trace.open import open_trace

    opened = open_trace(path, unit_tokens)
    if opened.length is None:
        raise ConfigError(f"{asked_by} needs several passes, but {path} can be read only once; name a file")
    if not opened.tells_prefixes:
        instead = "or describe a workload, such as users=500,turns=6"
        raise ConfigError(f"{asked_by}: {opened.name} {ONLY_LENGTHS}, {instead}")
    return opened


def _replay(
    trace: Trace, model: ServedModel, settings: ReplaySettings, requests: Path | None, *, curve: bool
) -> Outcome:
    """Run a replay, with a progress bar on a terminal. A second pass computes the curve.

    If the user presses Ctrl-C, the outcome has the numbers so far.

    Args:
        trace: trace to replay.
        model: model and settings of the engines.
        settings: settings of the replay.
        requests: file to write, with what was found for each request; None for no file.
        curve: True to compute the curve.
    """
    from kvferry.cli.curves import curve_after
    from kvferry.cli.progress import progress
    from kvferry.replay.curve import CurvePoint
    from kvferry.replay.report import Outcome
    from kvferry.replay.simulation import Simulation

    with _request_log(requests, tells_prefixes=trace.tells_prefixes) as log:
        simulation = Simulation(model, settings, trace.unit_tokens, log)
        complete, points = False, tuple[CurvePoint, ...]()
        try:
            simulation.run(progress(trace, "replay"))
            points = tuple(curve_after(trace, simulation)) if curve else ()
            complete = True
        except KeyboardInterrupt:
            pass
    return Outcome(simulation, trace.name, complete, points, trace.tells_prefixes)


@contextmanager
def _request_log(
    path: Path | None, *, tells_prefixes: bool
) -> Iterator[Callable[[TraceRequest, Hit], None] | None]:
    """Yield a function that writes a line of JSON for each request; None without a path.

    Args:
        path: file to write.
        tells_prefixes: False if the trace has only lengths, so that hits are null.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    with _writing(path):
        file = path.open("w", encoding="utf-8")

    def write(request: TraceRequest, hit: Hit) -> None:
        line = {
            "arrival": request.arrival,
            "prompt_tokens": request.prompt_tokens,
            "local_tokens": hit.local_tokens if tells_prefixes else None,
            "tier_tokens": hit.tier_tokens if tells_prefixes else None,
        }
        with _writing(path):
            file.write(json.dumps(line) + "\n")

    try:
        yield write
    finally:
        with _writing(path):
            file.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ConfigError for an OSError inside the ``with`` statement: the file cannot be written."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"cannot write {path}: {reason}; name a file that can be written") from error
