"""`kvferry plan`: predict the cost of moving a model's KV cache, and the storage that it takes in tiers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.options import (
    INTERRUPTED,
    argument,
    check_folder,
    command,
    count,
    flag,
    option,
    print_error,
    without_none,
    write_file,
)
from kvferry.tools.cli.traces import curve_of_model, open_for_curve, passes_over, print_notes
from kvferry.tools.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.tools.models import ModelReading
    from kvferry.tools.plan.fleet import FleetForecast
    from kvferry.tools.plan.forecast import Forecast
    from kvferry.tools.plan.kept import KeptSettings, TierForecast
    from kvferry.tools.plan.side import EngineSide
    from kvferry.tools.replay.curve import CurvePoint
    from kvferry.tools.replay.trace.base import Trace

# The defaults of `KeptSettings`, which would load numpy here, and `--help` has to stay fast.
_STEP_TOKENS, _PROMPT_TOKENS = 8192, 128 << 10
_HOST_MEMORY = "64GiB"
DTYPE_HELP = "Element type of the KV cache: auto, float32, bfloat16, fp8, ..."
FIRST_SNAPSHOT_HELP = (
    "First position of a snapshot for shared prefixes, 0 for none; by default the connector's."
)
UNIT_HELP = "Tokens per unit of the trace, where the trace does not say it."
# Exit code if the connector would refuse the transfer, so that a script can tell.
_REFUSED = 1


@dataclass(frozen=True)
class PlanOptions:
    """The options of `kvferry plan`."""

    model: str | None = argument(
        "MODEL", "A config.json, its folder, a name that --list prints, or a Hugging Face id.", None
    )
    tokens: int = count(4096, "Tokens of the prompt to transfer.")
    tp: int = option(1, "RANKS", "Tensor-parallel ranks of the sending engine.")
    to_tp: int | None = option(
        None, "RANKS", "Tensor-parallel ranks of the receiving engine; by default as --tp."
    )
    pp: int = option(1, "RANKS", "Pipeline-parallel ranks of the sending engine.")
    to_pp: int | None = option(
        None, "RANKS", "Pipeline-parallel ranks of the receiving engine; by default as --pp."
    )
    dcp: int = option(1, "RANKS", "Decode-context-parallel ranks of the sending engine, a divisor of --tp.")
    to_dcp: int | None = option(
        None, "RANKS", "Decode-context-parallel ranks of the receiving engine; by default as --dcp."
    )
    interleave: int = option(
        1, "TOKENS", "Tokens that each of these ranks takes in turn (vLLM's --cp-kv-cache-interleave-size)."
    )
    to_interleave: int | None = option(
        None, "TOKENS", "The same of the receiving engine; by default as --interleave."
    )
    block_size: int | None = count(None, "Tokens per block of the sending engine; by default vLLM's choice.")
    to_block_size: int | None = count(
        None, "Tokens per block of the receiving engine; by default as --block-size."
    )
    layout: str = option(
        "auto",
        "NAME",
        "Layout of the sending engine: auto, LBNHC (NHD), LBHNC (HND), LHBNC, BLHNC, BLNHC, BHLNC.",
    )
    to_layout: str | None = option(None, "NAME", "Layout of the receiving engine; by default as --layout.")
    backend: str | None = option(
        None,
        "NAME",
        "Attention backend of the sending engine, e.g. FLASHINFER; by default vLLM's choice on CUDA.",
    )
    to_backend: str | None = option(
        None, "NAME", "Attention backend of the receiving engine; by default as --backend."
    )
    dtype: str = option("auto", "NAME", DTYPE_HELP)
    kv: str = option("packed", "NAME", "packed: a page holds K and V; apart: K and V have separate pages.")
    mtp: bool = flag("--mtp", "Include the multi-token prediction layers.")
    strategy: str = option(
        "auto", "NAME", "Transfer strategy: auto for the cheapest, direct, over-read, staged or shared."
    )
    bandwidth: float | None = option(
        None, "GB/S", "Bandwidth of a rank's network link in GB/s; by default unlimited."
    )
    one_machine: bool = flag(
        "--one-machine", "Both engines run on one machine, and can share host memory (strategy shared)."
    )
    costs: str | None = option(
        None,
        "FILE",
        "File that `kvferry doctor --calibrate` wrote; by default this machine's, else built-in costs.",
    )
    step_tokens: int = count(_STEP_TOKENS, "For the tiers: the engine's --max-num-batched-tokens.")
    retention: str = option(
        "0",
        "COUNT",
        "For the tiers: the engine's --prefix-cache-retention-interval, a number of tokens or None.",
    )
    chunk_tokens: int | None = count(
        None, "For the tiers: tokens per chunk; by default the connector's choice."
    )
    snapshot_tokens: int | None = count(
        None, "For the tiers: tokens between snapshots; by default as many as in a chunk."
    )
    first_snapshot_tokens: int | None = count(None, FIRST_SNAPSHOT_HELP)
    kept_tokens: int = count(_PROMPT_TOKENS, "For the tiers: tokens of the prompt to store.")
    engines: int | None = count(None, "Engines of a fleet that read each other's host memory.")
    host_memory: str | None = option(
        None, "SIZE", "For --engines: host memory of each engine; by default 64GiB."
    )
    trace: str | None = option(
        None, "TRACE", "Trace as for `kvferry replay`: adds the hit rate by host memory to --html and --json."
    )
    kv_cache_memory: str | None = option(
        None, "SIZE", "For --trace: memory of a rank for KV cache; by default 40GiB."
    )
    unit_tokens: int | None = count(None, UNIT_HELP)
    as_json: bool = flag("--json", "Print JSON, in bytes and seconds.")
    html: Path | None = option(None, "FILE", "HTML file to write, with a picture of the transfer.")
    listed: bool = flag("--list", "Print the table of models, with sources.")


@command
def plan(options: PlanOptions) -> None:
    """Predict what a transfer of MODEL's KV cache costs.

    Prints the bytes and the time that it takes to move a prompt's KV cache from one engine to another, and
    the storage that it takes in the tiers. Nothing is run, and no weights are read.
    """
    if options.listed:
        from kvferry.tools.plan.show import models_as_json, show_models

        if options.as_json:
            print(json.dumps(models_as_json()))
        else:
            show_models(Report.to_stdout())
        return
    reading = _read(options)
    _check_options(options)
    trace = _open(options)
    from kvferry.tools.plan.blocks import parse_retention
    from kvferry.tools.plan.forecast import Pricing, forecast, limit_bandwidth, parse_strategy
    from kvferry.tools.plan.kept import KeptSettings, forecast_tiers
    from kvferry.tools.plan.side import EngineSide, resolve_layout
    from kvferry.transport import load_costs

    separate = options.kv == "apart"
    source = EngineSide(
        options.tp,
        options.pp,
        resolve_layout(options.layout, reading),
        options.block_size,
        options.backend,
        options.dcp,
        options.interleave,
    )
    destination = replace(
        source,
        **without_none(
            tp=options.to_tp,
            pp=options.to_pp,
            layout=resolve_layout(options.to_layout, reading) if options.to_layout else None,
            block_tokens=options.to_block_size,
            backend=options.to_backend,
            dcp=options.to_dcp,
            turn_tokens=options.to_interleave,
        ),
    )
    pricing = Pricing(
        limit_bandwidth(load_costs(options.costs), options.bandwidth),
        parse_strategy(options.strategy),
        one_machine=options.one_machine,
    )
    transfer = forecast(reading, (source, destination), options.tokens, pricing, separate=separate)
    settings = KeptSettings(
        options.step_tokens,
        parse_retention(options.retention),
        options.chunk_tokens,
        options.snapshot_tokens,
        options.kept_tokens,
        options.first_snapshot_tokens,
    )
    # Also for a refused transfer: tiers do not need the other engine.
    kept = forecast_tiers(reading, source, settings)
    fleet = None
    if options.engines is not None:
        from kvferry.tools.plan.fleet import forecast_fleet

        fleet = forecast_fleet(kept, options.engines, options.host_memory or _HOST_MEMORY, pricing.costs)
    curve = _Curve() if trace is None else _curve(trace, reading, source, settings, options)
    if options.html is not None and not transfer.refused:
        from kvferry.tools.plan.page import picture

        write_file(
            options.html, picture(transfer, reading, separate=separate, more=_sections(kept, fleet, curve))
        )
    # Output comes before the exit codes below, also after Ctrl-C: all but the curve is known by then.
    if options.as_json:
        _print_json(transfer, kept, fleet, curve)
    else:
        _print(transfer, kept, fleet, options.html)
    if not curve.complete:
        raise SystemExit(INTERRUPTED)
    if transfer.refused:
        raise SystemExit(_REFUSED)


def _read(options: PlanOptions) -> ModelReading:
    from kvferry.tools.models import read_model
    from kvferry.tools.plan.find import find_config

    if options.model is None:
        raise ConfigError(
            "MODEL is missing; give a config.json, its folder, or a name that `kvferry plan --list` prints"
        )
    name, config = find_config(options.model)
    return read_model(config, options.dtype, name=name, draft=options.mtp)


def _check_options(options: PlanOptions) -> None:
    if options.tokens < 1:
        raise ConfigError(f"--tokens is {options.tokens}; a prompt has at least 1")
    if options.kv not in ("packed", "apart"):
        raise ConfigError(f"--kv {options.kv} is not known; choose packed or apart")
    check_folder(options.html)
    of_trace = {"--unit-tokens": options.unit_tokens, "--kv-cache-memory": options.kv_cache_memory}
    for name, value in of_trace.items():
        if value is not None and options.trace is None:
            raise ConfigError(f"{name} is for the curve of a trace; add --trace FILE, or leave it out")
    if options.host_memory is not None and options.engines is None:
        raise ConfigError("--host-memory is for a fleet; add --engines COUNT, or leave it out")


class _Curve(NamedTuple):
    """The hit rate by capacity of host memory."""

    points: Sequence[CurvePoint] = ()  # points of the curve; empty without a trace, or after Ctrl-C
    about: str = ""
    complete: bool = True  # False after Ctrl-C


def _open(options: PlanOptions) -> Trace | None:
    if options.trace is None:
        return None
    # Several passes over a trace take minutes, so they are not made for a curve that nobody sees.
    if not options.as_json and options.html is None:
        raise ConfigError("--trace adds a curve to a page or to JSON; add --html FILE or --json")
    return open_for_curve(options.trace, options.unit_tokens, "--trace")


def _curve(
    trace: Trace, reading: ModelReading, side: EngineSide, settings: KeptSettings, options: PlanOptions
) -> _Curve:
    from kvferry.tools.replay.settings import served_model

    assert options.trace is not None  # noqa: S101 - the trace has been opened
    try:
        with passes_over(trace, options.trace, options.unit_tokens) as passes:
            model = served_model(reading, side, settings)
            points, about = curve_of_model(passes, model, options.kv_cache_memory)
    except KeyboardInterrupt:
        print_error("interrupted; the hit-rate curve is left out")
        return _Curve(complete=False)
    print_notes(trace)
    return _Curve(points, about)


def _sections(kept: TierForecast, fleet: FleetForecast | None, curve: _Curve) -> Iterator[str]:
    from kvferry.tools.plan.page.document import text_block
    from kvferry.tools.plan.show import show_fleet, show_kept

    yield "<section><h2>Storage in the tiers</h2>"
    yield text_block(partial(show_kept, kept))
    if fleet is not None:
        yield text_block(partial(show_fleet, fleet))
    yield "</section>"
    if curve.points:
        from kvferry.tools.replay.page import curve_section

        yield from curve_section(curve.points, curve.about)


def _print(transfer: Forecast, kept: TierForecast, fleet: FleetForecast | None, html: Path | None) -> None:
    from kvferry.tools.plan.show import show, show_fleet, show_kept

    report = Report.to_stdout()
    show(transfer, report)
    show_kept(kept, report)
    if fleet is not None:
        show_fleet(fleet, report)
    if not transfer.refused:
        report.text()
        report.note(f"The picture is in {html}." if html else "Next: --html FILE draws this transfer.")


def _print_json(transfer: Forecast, kept: TierForecast, fleet: FleetForecast | None, curve: _Curve) -> None:
    from kvferry.tools.plan.show import as_json, fleet_as_json, kept_as_json

    points: list[dict[str, float]] = []
    if curve.points:  # without a trace, no simulation is imported
        from kvferry.tools.replay.curve import curve_as_json

        points = curve_as_json(curve.points)
    more = {"tiers": kept_as_json(kept), "fleet": fleet and fleet_as_json(fleet), "curve": points}
    print(json.dumps({**as_json(transfer), **more}))
