"""`kvferry plan`: predict the cost of moving a model's KV cache, and the storage that it takes in tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli import plan_options as opt
from kvferry.cli.options import without_none, write_file
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.geometry.models import ModelReading
    from kvferry.plan.forecast import Forecast
    from kvferry.plan.kept import TierForecast

_STEP_TOKENS, _PROMPT_TOKENS = 8192, 128 << 10


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
    dtype: opt.Dtype = "auto",
    kv: opt.Planes = "packed",
    mtp: opt.Mtp = False,
    strategy: opt.StrategyName = "auto",
    bandwidth: opt.Bandwidth = None,
    costs: opt.CostsFile = None,
    step_tokens: opt.StepTokens = _STEP_TOKENS,
    retention: opt.Retention = "0",
    chunk_tokens: opt.ChunkTokens = None,
    snapshot_tokens: opt.SnapshotTokens = None,
    kept_tokens: opt.KeptTokens = _PROMPT_TOKENS,
    as_json: opt.Json = False,
    html: opt.Html = None,
    listed: opt.Listed = False,
) -> None:
    """Predict what a transfer of MODEL's KV cache costs.

    Prints the bytes and the time that it takes to move a prompt's KV cache from one engine to another, and
    the storage that it takes in the tiers. Nothing is run, and no weights are read.
    """
    if listed:
        _print_models()
        return
    reading = _read(model, dtype, mtp=mtp)
    separate = _check_options(tokens, kv)
    from kvferry.plan.cost import Pricing, limit_bandwidth, parse_strategy
    from kvferry.plan.forecast import forecast
    from kvferry.plan.kept import KeptSettings, forecast_tiers
    from kvferry.plan.side import EngineSide, resolve_layout
    from kvferry.plan.snapshots import parse_retention
    from kvferry.transport.costs_file import load_costs

    source = EngineSide(tp, pp, resolve_layout(layout, reading), block_size)
    to = resolve_layout(to_layout, reading) if to_layout else None
    destination = replace(source, **without_none(tp=to_tp, pp=to_pp, layout=to, block_tokens=to_block_size))
    pricing = Pricing(limit_bandwidth(load_costs(costs), bandwidth), parse_strategy(strategy))
    transfer = forecast(reading, (source, destination), tokens, pricing, separate=separate)
    settings = KeptSettings(
        step_tokens, parse_retention(retention), chunk_tokens, snapshot_tokens, kept_tokens
    )
    kept = forecast_tiers(reading, source, settings)
    if html is not None:
        _write_html(html, transfer, reading, separate=separate)
    if as_json:
        _print_json(transfer, kept)
    else:
        _print(transfer, kept, html)


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


def _print_models() -> None:
    from kvferry.plan.show import show_models
    from kvferry.report import Report

    show_models(Report.to_stdout())


def _print(transfer: Forecast, kept: TierForecast, html: Path | None) -> None:
    from kvferry.plan.show import show
    from kvferry.plan.show_kept import show_kept
    from kvferry.report import Report

    report = Report.to_stdout()
    show(transfer, report)
    show_kept(kept, report)
    report.text()
    report.note(f"The picture is in {html}." if html else "Next: --html FILE draws this transfer.")


def _print_json(transfer: Forecast, kept: TierForecast) -> None:
    from kvferry.plan.numbers import as_json, kept_as_json

    print(json.dumps({**as_json(transfer), "tiers": kept_as_json(kept)}))


def _write_html(path: Path, transfer: Forecast, reading: ModelReading, *, separate: bool) -> None:
    from kvferry.plan.page import picture

    write_file(path, picture(transfer, reading, separate=separate))
