"""Output of a handover forecast as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvferry.geometry import GroupKind, GroupPattern
from kvferry.geometry.models import read_model
from kvferry.geometry.store import LayerCache
from kvferry.tools.plan.find import entries
from kvferry.tools.plan.forecast import Forecast, RefusedTransfer
from kvferry.tools.plan.side import EngineSide
from kvferry.tools.plan.totals import TransferEstimate
from kvferry.report import Report
from kvferry.table import Column
from kvferry.units import counted, format_bytes, format_count, format_seconds

_ALL = "all"
_NAMES = {
    GroupKind.FULL: "full attention",
    GroupKind.SLIDING: "window",
    GroupKind.CHUNKED: "chunk",
    GroupKind.MLA: "latent",
    GroupKind.STATE: "state",
}


# Columns of the table that shows a forecast.
COLUMNS = (
    Column("layers", left=True),
    Column("per token or state", rank=5),
    Column("run length", rank=4),
    Column("runs", rank=3),
    Column("moved"),
    Column("share of full attention", rank=1),
    Column("method", rank=2, left=True),
    Column("time"),
)


def show(forecast: Forecast, report: Report) -> None:
    """Print the forecast of a handover: both engines, a table with one row per kind of layer, and notes."""
    name, *lines = heading(forecast)
    report.heading(name)
    for line in lines:
        report.text(line)
    report.text()
    report.table(COLUMNS, [*table_cells(forecast)], last_is_total=len(forecast.rows) > 1)
    report.text()
    report.note("A run is contiguous in both engines: one NIXL descriptor.")
    for note in forecast.notes:
        report.note(f"Note: {note}.")


def show_refused(refused: RefusedTransfer, report: Report) -> None:
    """Print a handover that kvferry's connector refuses: both engines, the reasons, and notes."""
    report.heading(f"{refused.model}, a prompt of {counted(refused.tokens, 'token')}")
    report.text("refused: the destination computes the prompt itself")
    for line in _engines(refused):
        report.text(line)
    report.text()
    for reason in refused.reasons:
        report.text(f"Refused: {reason}")
    for note in refused.notes:
        report.note(f"Note: {note}.")


def describe(cache: LayerCache) -> str:
    """Return a short name for a kind of layer, such as ``full attention``, ``window 1,024`` or ``latent``."""
    return named(cache, cache.fields[0].name if cache.kind is GroupKind.MLA else "")


def named(group: GroupPattern, instead: str = "") -> str:
    """Return a short name for a kind of layer, with another word in place of its kind's if one is given."""
    name = instead or _NAMES[group.kind]
    return f"{name} {group.attention_span:,}" if group.attention_span else name


def heading(forecast: Forecast) -> Iterator[str]:
    """Yield lines about a forecast: the model, the result, both engines, and the size of the KV cache."""
    yield f"{forecast.model}, a prompt of {counted(forecast.tokens, 'token')}"
    yield result(forecast)
    yield from _engines(forecast)
    kept = [f"{format_bytes(forecast.token_bytes)} per token"] if forecast.token_bytes else []
    kept += [f"{format_bytes(forecast.state_bytes)} of state per sequence"] if forecast.state_bytes else []
    yield f"KV cache: {' and '.join(kept)}"


def _engines(transfer: Forecast | RefusedTransfer) -> Iterator[str]:
    sides = zip((transfer.source, transfer.destination), transfer.blocks, strict=True)
    here, there = (engine(side, tokens) for side, tokens in sides)
    yield f"from {here}"
    yield f"to {'an engine with the same settings' if here == there else there}"


def result(forecast: Forecast) -> str:
    """Return the result of a forecast in a few words: bytes, time, and the share of full attention."""
    whole = forecast.whole
    text = f"moves {format_bytes(whole.bytes)} in about {format_seconds(whole.seconds)}"
    if whole.full_bytes is None or whole.bytes >= whole.full_bytes:
        return text
    return f"{text}: {_share(whole)} of what full attention would take"


def engine(side: EngineSide, block_tokens: int) -> str:
    """Return a short description of an engine: parallel sizes, layout and block size."""
    return f"{side.label}, blocks of {counted(block_tokens, 'token')}"


def table_cells(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table that shows a forecast: a text per column.

    If there are several kinds of layers, a row for all layers follows.
    """
    for row in forecast.rows:
        kept = format_bytes(row.layers * row.cache.bytes_of(1))
        *cells, method, seconds = _estimate_cells(row.estimate)
        method = f"{method}, whole" if row.whole else method
        yield f"{row.layers} {describe(row.cache)}", kept, *cells, method, seconds
    if len(forecast.rows) > 1:
        yield _ALL, "", *_estimate_cells(forecast.whole)


def _estimate_cells(estimate: TransferEstimate) -> Iterator[str]:
    yield format_bytes(estimate.run_bytes)
    yield format_count(estimate.descriptors)
    yield format_bytes(estimate.bytes)
    yield _share(estimate)
    yield estimate.strategy
    yield format_seconds(estimate.seconds)


def _share(estimate: TransferEstimate) -> str:
    return "" if not estimate.full_bytes else f"{estimate.bytes / estimate.full_bytes:.0%}"


def show_models(report: Report) -> None:
    """Print each model of the built-in table with its kinds of layers and the origin of its configuration."""
    for entry in entries():
        reading = read_model(entry.config)
        kinds = Counter(reading.cache.layers)
        kinds_text = ", ".join(f"{count} {describe(cache)}" for cache, count in kinds.items())
        also = f" (also {', '.join(entry.also)})" if entry.also else ""
        report.text(f"{entry.name}{also}: {kinds_text}")
        report.text(entry.source, "dim", indent=2)
