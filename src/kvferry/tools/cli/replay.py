"""`kvferry replay`: whether tiers are worth it, and how large, by simulating engines on a request trace."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.common.errors import ConfigError
from kvferry.common.units import parse_size
from kvferry.tools.cli.options import (
    INTERRUPTED,
    argument,
    check_folder,
    command,
    count,
    flag,
    option,
    print_result,
    write_file,
    writing,
)
from kvferry.tools.cli.plan import DTYPE_HELP, FIRST_SNAPSHOT_HELP, UNIT_HELP
from kvferry.tools.cli.traces import open_for_curve, passes_over, print_notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.tiers import Tenants
    from kvferry.tools.replay.engine import Hit
    from kvferry.tools.replay.hints import HintSetting
    from kvferry.tools.replay.passes import Passes
    from kvferry.tools.replay.replayed import Replayed
    from kvferry.tools.replay.settings import (
        AdmissionSetting,
        RecordedEngine,
        ReplaySettings,
        ServedModel,
        TierSetting,
    )
    from kvferry.tools.replay.show import Outcome
    from kvferry.tools.replay.sizing import Sizing
    from kvferry.tools.replay.trace.base import TraceRequest
    from kvferry.tools.replay.wear import Endurance

_STEP_TOKENS = 8192
# Names of replays to compare with.
_ALL_CHUNKS, _WITHOUT_HINTS = "all chunks", "without hints"


@dataclass(frozen=True)
class ReplayOptions:
    """The options of `kvferry replay`."""

    trace: str = argument(
        "TRACE",
        "Trace: JSON lines, a JSON array, CSV, or one that an engine recorded; - for standard input. Or a "
        "workload of conversations, such as users=500,turns=6.",
    )
    model: str = option(
        MISSING, "MODEL", "A config.json, its folder, a name of `kvferry plan --list`, or an id."
    )
    tier: list[str] | None = option(
        None,
        "KIND=SIZE",
        "A tier: host=64GiB, fleet (the host memory of the other engines), file=2TiB, file=2TiB:shared, "
        "object=unlimited. Repeatable, fastest first. "
        "With --target-hit, host memory in front of the disk; by default 1/16 of the disk.",
    )
    engine_blocks: int | None = count(
        None, "Blocks in an engine's pool, 0 for no prefix cache; by default the recorded engine's."
    )
    kv_cache_memory: str | None = option(
        None, "SIZE", "Memory of a rank for KV cache; by default as in the recorded engine, else 40GiB."
    )
    min_uses: int = count(1, "Prompts that must have had a chunk before it is written to storage.")
    min_prompt_tokens: int = count(0, "Length of prompts below which no chunk is written to storage.")
    write_per_day: str | None = option(
        None, "SIZE", "Bytes that may be written to each tier in storage per day, such as 2TiB."
    )
    endurance: str | None = option(
        None, "SIZE", "Bytes that the disk of a file tier endures, such as 1.2PB, to say how long it lasts."
    )
    policy: str = option("lru", "NAME", "Eviction policy of host memory: lru, arc, s3fifo or density.")
    prefill_tokens_per_second: float = option(
        0.0, "COUNT", "Tokens that an engine computes per second; 0 to leave time out."
    )
    bandwidth: list[str] | None = option(
        None, "KIND=GB/S", "Speed of loads from a kind of tier in GB/s, as in file=6. Repeatable."
    )
    hint: list[str] | None = option(
        None,
        "KEY=VALUE,...",
        "A hint that clients send, as in docs/hints.md: retain_seconds=600,end=4096; store=false,start=4096; "
        "ends_session; prefetch=session,lead_seconds=10. Repeatable: all are sent. Also replays without.",
    )
    hint_share: float | None = option(
        None, "SHARE", "Share of host memory that hints may take; by default the setting's, 0.1."
    )
    tenants: str | None = option(
        None,
        "JSON",
        "Weights and limits of tenants, as in the setting tenants. A name alone is that in the trace.",
    )
    engines: int = count(1, "Number of engines.")
    route: str = option("prefix", "NAME", "Choice of the engine: prefix, session, least-busy or random.")
    concurrency: int = count(
        0, "Sessions at once; one begins when another has ended. By default, all begin at their times."
    )
    tp: int = option(1, "RANKS", "Tensor-parallel ranks of an engine.")
    block_size: int | None = count(None, "Tokens per block; by default vLLM's choice.")
    dtype: str = option("auto", "NAME", DTYPE_HELP)
    step_tokens: int | None = count(
        None, "The engine's --max-num-batched-tokens; by default the recorded one's, else 8192."
    )
    retention: str = option(
        "0", "COUNT", "The engine's --prefix-cache-retention-interval, a number of tokens or None."
    )
    chunk_tokens: int | None = count(None, "Tokens per chunk; by default the connector's choice.")
    snapshot_tokens: int | None = count(None, "Tokens between snapshots; by default as many as in a chunk.")
    first_snapshot_tokens: int | None = count(None, FIRST_SNAPSHOT_HELP)
    unit_tokens: int | None = count(None, UNIT_HELP)
    skip: int = count(0, "Requests at the start that are replayed but not counted.")
    seed: int = option(0, "NUMBER", "Seed of random choices.")
    curve: bool = flag("--curve", "Also compute the hit rate by capacity of host memory.")
    target_hit: float | None = option(
        None,
        "SHARE",
        "Instead find the memory or disk of one engine that saves this share of the prompt tokens.",
    )
    disk_writes_per_day: float | None = option(
        None,
        "COUNT",
        "Instead of --endurance: full writes per day that the disk endures for five years; with "
        "--target-hit by default 1.",
    )
    requests: Path | None = option(None, "FILE", "File to write, with what was found for each request.")
    as_json: bool = flag("--json", "Print JSON, in bytes, seconds and tokens.")
    html: Path | None = option(None, "FILE", "HTML file to write, with the curve as a picture.")


@command
def replay(options: ReplayOptions) -> None:
    """Predict what tiers save on a request trace, and their size.

    Simulates engines and their tiers with the code that looks chunks up, chooses what to store and evicts in
    a real engine. Nothing is run, and no weights are read. The numbers of a workload and their defaults:
    users=1000, requests-per-second=10, shared-prompt-tokens=1000, turns=5, prompt-tokens=500,
    output-tokens=300 (means), hours=0.5, seed=0.
    """
    sizing = options.target_hit is not None
    from kvferry.tools.replay.page import page, size_page
    from kvferry.tools.replay.settings import (
        ADMIT_ALL,
        ReplaySettings,
        block_pool,
        parse_tier,
        recorded_engine,
    )
    from kvferry.tools.replay.show import as_json, show, show_size, size_as_json
    from kvferry.tools.replay.sizing import Sizing
    from kvferry.tools.replay.trace.open import open_trace

    check_folder(options.html)
    admission = _admission(options)
    several_passes = {
        "--target-hit": sizing,
        "--curve": options.curve,
        "the comparison with all chunks": admission != ADMIT_ALL,
        "--hint": bool(options.hint),
    }
    asked_by = next((name for name, asked in several_passes.items() if asked), None)
    trace = (
        open_trace(options.trace, options.unit_tokens)
        if asked_by is None
        else open_for_curve(options.trace, options.unit_tokens, asked_by)
    )
    recorded = recorded_engine(trace.name, trace.header)
    served = _served_model(options, recorded)
    tiers = with_bandwidth([parse_tier(one) for one in options.tier or ["host=unlimited"]], options.bandwidth)
    with passes_over(trace, options.trace, options.unit_tokens) as passes:
        settings = ReplaySettings(
            tiers=tuple(tiers),
            engines=options.engines,
            pool=block_pool(served, options.engine_blocks, recorded.num_blocks, options.kv_cache_memory),
            policy=options.policy,
            admission=admission,
            hints=_hints(passes, options),
            tenants=_tenants(options.tenants),
            route=options.route,  # type: ignore[arg-type]  # checked by the class
            prefill_tokens_per_second=options.prefill_tokens_per_second,
            seed=options.seed,
            skip=options.skip,
            concurrency=options.concurrency,
        )
        found = (_size if sizing else _replay)(passes, served, settings, options)
    print_notes(trace)
    if isinstance(found, Sizing):
        if options.html is not None:
            write_file(options.html, size_page(found, trace.name))
        print_result(found, size_as_json, show_size, as_json=options.as_json)
        return
    if options.html is not None:
        write_file(options.html, page(found))
    print_result(found, as_json, show, as_json=options.as_json)
    if not found.complete:
        raise SystemExit(INTERRUPTED)


def _size(passes: Passes, model: ServedModel, settings: ReplaySettings, options: ReplayOptions) -> Sizing:
    """Find the smallest tiers that reach ``--target-hit``. Raise ConfigError for an unused option."""
    from kvferry.tools.replay.settings import ADMIT_ALL
    from kvferry.tools.replay.sizing import SizeQuestion, size

    others = (
        options.bandwidth,
        options.requests,
        options.endurance,
        settings.admission != ADMIT_ALL,
        options.hint,
        options.tenants,
    )
    if any(others) or settings.engines > 1 or len(settings.tiers) > 1:
        raise ConfigError(
            "--target-hit looks for the size of one engine's tiers; leave out --bandwidth, --requests, "
            "--engines, --endurance, --min-uses, --min-prompt-tokens, --write-per-day, --hint, --tenants and "
            "any --tier but host=SIZE"
        )
    assert options.target_hit is not None  # noqa: S101 - the caller has checked it
    host = settings.tiers[0].capacity_bytes if options.tier else None
    writes = 1.0 if options.disk_writes_per_day is None else options.disk_writes_per_day
    question = SizeQuestion(options.target_hit, host, writes)
    return size(passes, model, settings, question)


def _admission(options: ReplayOptions) -> AdmissionSetting:
    """Return what decides whether a chunk is written to storage. Raise ConfigError for a wrong budget."""
    from kvferry.tools.replay.settings import AdmissionSetting

    per_day = None if options.write_per_day is None else parse_size(options.write_per_day)
    if per_day == 0:
        raise ConfigError("--write-per-day is 0; give a size above 0, or leave it out for no limit")
    return AdmissionSetting(options.min_uses, options.min_prompt_tokens, per_day)


def _hints(passes: Passes, options: ReplayOptions) -> HintSetting | None:
    """Return the hints of clients. Reads the trace if one is about sessions."""
    from kvferry.connector import ConnectorConfig
    from kvferry.tools.replay.hints import HintSetting, count_turns, parse_hint

    if not options.hint:
        if options.hint_share is not None:
            raise ConfigError("--hint-share is about hints, and there is none; add --hint, or leave it out")
        return None
    config = ConnectorConfig()
    share = config.hint_share if options.hint_share is None else options.hint_share
    setting = HintSetting(tuple(map(parse_hint, options.hint)), share, config.hint_seconds)
    if not setting.needs_sessions:
        return setting
    return replace(setting, turns=count_turns(passes.trace.name, passes.requests("sessions")))


def _tenants(text: str | None) -> Tenants | None:
    """Return the weights of tenants, or raise ConfigError."""
    from kvferry.connector import read_tenants
    from kvferry.tiers import OTHERS
    from kvferry.tools.replay.content import tenant_digest

    if text is None:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'--tenants {text!r} is not JSON; write an object such as {{"acme": {{"weight": 3}}}}'
        ) from error
    if isinstance(given, dict):
        for name, one in given.items():
            if isinstance(one, dict) and name != OTHERS and not one.keys() & {"salt_digest", "adapter"}:
                one["salt_digest"] = tenant_digest(name).hex()
    return read_tenants(given)


def _endurance(options: ReplayOptions) -> Endurance:
    from kvferry.tools.replay.wear import Endurance

    if options.endurance is not None and options.disk_writes_per_day is not None:
        raise ConfigError("--endurance and --disk-writes-per-day both say what a disk endures; leave one out")
    total = None if options.endurance is None else parse_size(options.endurance)
    return Endurance(total, options.disk_writes_per_day)


def _served_model(options: ReplayOptions, recorded: RecordedEngine) -> ServedModel:
    """Return the model and the engine settings of a replay.

    Options that are not given get the settings of the engine that recorded the trace.

    Raises:
        KVFerryError: the model is not known, or an engine cannot have these settings.
    """
    from kvferry.tools.models import read_model
    from kvferry.tools.plan.blocks import parse_retention
    from kvferry.tools.plan.find import find_config
    from kvferry.tools.plan.kept import KeptSettings
    from kvferry.tools.plan.side import EngineSide, resolve_layout
    from kvferry.tools.replay.settings import served_model, with_blocks

    name, config = find_config(options.model)
    reading = read_model(config, options.dtype, name=name, draft=False)
    block_tokens = options.block_size or recorded.common_block
    side = EngineSide(options.tp, 1, resolve_layout("auto", reading), block_tokens)
    first = options.first_snapshot_tokens
    kept = KeptSettings(
        options.step_tokens or recorded.step_tokens or _STEP_TOKENS,
        parse_retention(options.retention),
        options.chunk_tokens or recorded.chunk_tokens,
        # The recorded distance of snapshots is a multiple of the recorded chunk, not of another one.
        options.snapshot_tokens or (None if options.chunk_tokens else recorded.snapshot_tokens),
        first_snapshot_tokens=recorded.first_snapshot_tokens if first is None else first,
    )
    served = served_model(reading, side, kept)
    known = None if options.block_size else recorded.common_block
    return with_blocks(served, known) if known else served


def with_bandwidth(tiers: list[TierSetting], texts: list[str] | None) -> list[TierSetting]:
    """Return tiers with the speeds of ``--bandwidth``, such as ``file=6`` in GB/s.

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


def _replay(passes: Passes, model: ServedModel, settings: ReplaySettings, options: ReplayOptions) -> Outcome:
    """Run a replay and what it is compared with. After Ctrl-C, return the numbers so far."""
    from kvferry.tools.replay.curve import CurvePoint, hit_rate_curve
    from kvferry.tools.replay.settings import ADMIT_ALL
    from kvferry.tools.replay.show import Outcome
    from kvferry.tools.replay.simulation import Simulation
    from kvferry.tools.replay.wear import Endurance, wear_of

    endurance, trace = _endurance(options), passes.trace
    if (endurance != Endurance() or settings.admission != ADMIT_ALL) and len(settings.tiers) == 1:
        raise ConfigError(
            "--endurance, --disk-writes-per-day, --min-uses, --min-prompt-tokens and --write-per-day are "
            "about tiers in storage, and there is none; add one, such as --tier file=2TiB"
        )
    wear_of(
        Simulation(model, settings, trace.unit_tokens).replayed(), endurance
    )  # refuses wrong options early
    with _request_log(options.requests, tells_prefixes=trace.tells_prefixes) as log:
        simulation = Simulation(model, settings, trace.unit_tokens, log)
        compared: dict[str, ReplaySettings] = {}
        if settings.admission != ADMIT_ALL:
            compared[_ALL_CHUNKS] = replace(settings, admission=ADMIT_ALL)
        if settings.hints is not None:
            compared[_WITHOUT_HINTS] = replace(settings, hints=None)
        found: dict[str, Replayed] = {}
        complete, points = False, tuple[CurvePoint, ...]()
        try:
            begun = {name: passes.begin(name, model, other) for name, other in compared.items()}
            simulation.run(passes.requests("replay"))
            found = {name: passes.result(one) for name, one in begun.items()}
            points = tuple(hit_rate_curve(passes, simulation.replayed())) if options.curve else ()
            complete = True
        except KeyboardInterrupt:  # a long replay says much before its end
            pass
    replayed = simulation.replayed()
    worn = [found[_ALL_CHUNKS], replayed] if _ALL_CHUNKS in found else [replayed]
    return Outcome(
        replayed,
        trace.name,
        complete,
        points,
        tuple(row for one in worn for row in wear_of(one, endurance)) if complete else (),
        found.get(_WITHOUT_HINTS) if complete else None,
        tells_prefixes=trace.tells_prefixes,
    )


@contextmanager
def _request_log(
    path: Path | None, *, tells_prefixes: bool
) -> Iterator[Callable[[TraceRequest, Hit], None] | None]:
    """Yield a function that writes a line of JSON for each request; None without a path.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    with writing(path):
        file = path.open("w", encoding="utf-8")

    def write(request: TraceRequest, hit: Hit) -> None:
        # A trace of lengths alone has no keys to look up, so its hits are unknown, not 0.
        line = {
            "arrival": request.arrival,
            "prompt_tokens": request.prompt_tokens,
            "local_tokens": hit.local_tokens if tells_prefixes else None,
            "tier_tokens": hit.tier_tokens if tells_prefixes else None,
        }
        with writing(path):
            file.write(json.dumps(line) + "\n")

    try:
        yield write
    finally:
        with writing(path):
            file.close()
