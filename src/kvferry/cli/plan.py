"""`kvferry plan`: predict the cost of moving a model's KV cache, and the storage that it takes in tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvferry.cli import plan_options as opt
from kvferry.cli.options import check_folder, without_none, write_file
from kvferry.cli.output import INTERRUPTED, print_error
from kvferry.errors import ConfigError, Incompatible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvferry.geometry.models import ModelReading
    from kvferry.plan.forecast import Forecast, RefusedTransfer
    from kvferry.plan.kept import KeptSettings, TierForecast
    from kvferry.plan.side import EngineSide
    from kvferry.replay.curve import CurvePoint
    from kvferry.replay.trace.base import Trace

_STEP_TOKENS, _PROMPT_TOKENS = 8192, 128 << 10
_REFUSED = 1
"""Exit code if the connector refuses the transfer."""


def plan(
    model: opt.Model = None,
    tokens: opt.Tokens = 4096,
    tp: opt.Tp = 1,
    to_tp: opt.ToTp = None,
    pp: opt.Pp = 1,
    to_pp: opt.ToPp = None,
    block_size: opt.BlockSize = None,
    to_block_size: opt.ToBlockSize = None,
    layout: opt.Layout = "auto",
    to_layout: opt.ToLayout = None,
    backend: opt.Backend = None,
    to_backend: opt.ToBackend = None,
    dtype: opt.Dtype = "auto",
    kv: opt.Planes = "packed",
    mtp: opt.Mtp = False,
    strategy: opt.StrategyName = "auto",
    bandwidth: opt.Bandwidth = None,
    one_machine: opt.OneMachine = False,
    costs: opt.CostsFile = None,
    step_tokens: opt.StepTokens = _STEP_TOKENS,
    retention: opt.Retention = "0",
    chunk_tokens: opt.ChunkTokens = None,
    snapshot_tokens: opt.SnapshotTokens = None,
    first_snapshot_tokens: opt.FirstSnapshot = None,
    kept_tokens: opt.KeptTokens = _PROMPT_TOKENS,
    trace: opt.TraceFile = None,
    kv_cache_memory: opt.KVCacheMemory = None,
    unit_tokens: opt.UnitTokens = None,
    as_json: opt.Json = False,
    html: opt.Html = None,
    listed: opt.Listed = False,
) -> None:
    """Predict what a transfer of MODEL's KV cache costs.

    Prints the bytes and the time that it takes to move a prompt's KV cache from one engine to another, and
    the storage that it takes in the tiers. Nothing is run, and no weights are read.
    """
    if listed:
        _print_models(as_json=as_json)
        return
    reading = _read(model, dtype, mtp=mtp)
    separate = _check_options(tokens, kv)
    check_folder(html)
    without_trace = {"--unit-tokens": unit_tokens, "--kv-cache-memory": kv_cache_memory}
    if trace is None and (given := [name for name, value in without_trace.items() if value is not None]):
        raise ConfigError(f"{given[0]} is for the curve of a trace; add --trace FILE, or leave it out")
    opened = _open(trace, unit_tokens, shown=as_json or html is not None)
    from kvferry.plan.cost import Pricing, limit_bandwidth, parse_strategy
    from kvferry.plan.forecast import RefusedTransfer, forecast, refusal
    from kvferry.plan.kept import KeptSettings, forecast_tiers
    from kvferry.plan.side import EngineSide, resolve_layout
    from kvferry.plan.snapshots import parse_retention
    from kvferry.transport.costs_file import load_costs

    source = EngineSide(tp, pp, resolve_layout(layout, reading), block_size, backend)
    to = resolve_layout(to_layout, reading) if to_layout else None
    destination = replace(
        source, **without_none(tp=to_tp, pp=to_pp, layout=to, block_tokens=to_block_size, backend=to_backend)
    )
    pricing = Pricing(
        limit_bandwidth(load_costs(costs), bandwidth), parse_strategy(strategy), one_machine=one_machine
    )
    transfer: Forecast | RefusedTransfer
    try:
        transfer = forecast(reading, (source, destination), tokens, pricing, separate=separate)
    except Incompatible as error:
        transfer = refusal(reading, (source, destination), tokens, error.differences)
    settings = KeptSettings(
        step_tokens,
        parse_retention(retention),
        chunk_tokens,
        snapshot_tokens,
        kept_tokens,
        first_snapshot_tokens,
    )
    kept = forecast_tiers(reading, source, settings)
    curve = _Curve() if opened is None else _curve(opened, reading, source, settings, kv_cache_memory)
    refused = isinstance(transfer, RefusedTransfer)
    if html is not None and not isinstance(transfer, RefusedTransfer):
        _write_html(html, transfer, reading, _sections(kept, curve), separate=separate)
    if as_json:
        _print_json(transfer, kept, curve)
    else:
        _print(transfer, kept, html)
    if not curve.complete:
        raise SystemExit(INTERRUPTED)
    if refused:
        raise SystemExit(_REFUSED)


def _read(model: str | None, dtype: str, *, mtp: bool) -> ModelReading:
    from kvferry.geometry.models import read_model
    from kvferry.plan.find import find_config

    if model is None:
        raise ConfigError(
            "MODEL is missing; give a config.json, its folder, or a name that `kvferry plan --list` prints"
        )
    name, config = find_config(model)
    return read_model(config, dtype, name=name, draft=mtp)


def _check_options(tokens: int, kv: str) -> bool:
    """Check the values of `--tokens` and `--kv`, and return whether K and V are on separate pages.

    Args:
        tokens: length of the prompt in tokens.
        kv: "packed" for pages that hold K and V, "apart" for separate pages.

    Raises:
        ConfigError: a value is not allowed.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}; a prompt has at least 1")
    if kv not in ("packed", "apart"):
        raise ConfigError(f"--kv {kv} is not known; choose packed or apart")
    return kv == "apart"


class _Curve(NamedTuple):
    """The hit rate by capacity of host memory.

    Attributes:
        points: points of the curve; empty without a trace, or after Ctrl-C.
        about: sentences about the trace and the settings.
        complete: False after Ctrl-C.
    """

    points: Sequence[CurvePoint] = ()
    about: str = ""
    complete: bool = True


def _open(path: str | None, unit_tokens: int | None, *, shown: bool) -> Trace | None:
    """Open the trace of `--trace`; return None if there is none.

    Args:
        path: path of the trace.
        unit_tokens: number of tokens per unit, where the trace does not say it.
        shown: True if `--html` or `--json` is given.

    Raises:
        ConfigError: the file is no trace, or can be read only once, or an option is missing.
    """
    if path is None:
        return None
    if not shown:
        raise ConfigError("--trace adds a curve to a page or to JSON; add --html FILE or --json")
    from kvferry.cli.replay import open_for_curve

    return open_for_curve(path, unit_tokens, "--trace")


def _curve(
    trace: Trace,
    reading: ModelReading,
    side: EngineSide,
    settings: KeptSettings,
    kv_cache_memory: str | None,
) -> _Curve:
    """Return the hit rate by capacity of host memory, from several passes over a trace.

    Args:
        trace: trace to replay.
        reading: description of the model's KV cache.
        side: settings of the source engine that decide its memory layout.
        settings: settings of the source engine and its tiers.
        kv_cache_memory: memory of each of its ranks for KV cache; None for a default.
    """
    from kvferry.cli.curves import curve_of_model
    from kvferry.cli.replay import print_notes
    from kvferry.replay.model import served_model

    try:
        points, about = curve_of_model(trace, served_model(reading, side, settings), kv_cache_memory)
    except KeyboardInterrupt:
        print_error("interrupted; the hit-rate curve is left out")
        return _Curve(complete=False)
    print_notes(trace)
    return _Curve(points, about)


def _sections(kept: TierForecast, curve: _Curve) -> Iterator[str]:
    """Yield the HTML of the storage in tiers, and of a hit-rate curve if there is one."""
    from kvferry.plan.page.document import text_block
    from kvferry.plan.show_kept import show_kept

    yield "<section><h2>Storage in the tiers</h2>"
    yield text_block(partial(show_kept, kept))
    yield "</section>"
    if curve.points:
        from kvferry.replay.page import curve_section

        yield from curve_section(curve.points, curve.about)


def _print_models(*, as_json: bool) -> None:
    if as_json:
        from kvferry.plan.numbers import models_as_json

        print(json.dumps(models_as_json()))
        return
    from kvferry.plan.show import show_models
    from kvferry.report import Report

    show_models(Report.to_stdout())


def _print(transfer: Forecast | RefusedTransfer, kept: TierForecast, html: Path | None) -> None:
    from kvferry.plan.forecast import Forecast
    from kvferry.plan.show import show, show_refused
    from kvferry.plan.show_kept import show_kept
    from kvferry.report import Report

    report = Report.to_stdout()
    if not isinstance(transfer, Forecast):
        show_refused(transfer, report)
        show_kept(kept, report)
        return
    show(transfer, report)
    show_kept(kept, report)
    report.text()
    report.note(f"The picture is in {html}." if html else "Next: --html FILE draws this transfer.")


def _print_json(transfer: Forecast | RefusedTransfer, kept: TierForecast, curve: _Curve) -> None:
    from kvferry.plan.forecast import Forecast
    from kvferry.plan.numbers import as_json, kept_as_json, refused_as_json

    points: list[dict[str, float]] = []
    if curve.points:
        from kvferry.replay.curve import curve_as_json

        points = curve_as_json(curve.points)
    moved = as_json(transfer) if isinstance(transfer, Forecast) else refused_as_json(transfer)
    print(json.dumps({**moved, "tiers": kept_as_json(kept), "curve": points}))


def _write_html(
    path: Path, transfer: Forecast, reading: ModelReading, more: Iterable[str], *, separate: bool
) -> None:
    from kvferry.plan.page import picture

    write_file(path, picture(transfer, reading, separate=separate, more=more))
