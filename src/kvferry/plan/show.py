"""Output of a handover forecast on a terminal, in 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvferry.geometry import GroupKind
from kvferry.geometry.models import read_model
from kvferry.geometry.store import LayerCache
from kvferry.plan.find import entries
from kvferry.plan.forecast import Forecast
from kvferry.plan.side import EngineSide
from kvferry.plan.totals import TransferEstimate
from kvferry.units import format_bytes, format_count, format_seconds

_ALL = "all"
_NAMES = {
    GroupKind.FULL: "full attention",
    GroupKind.SLIDING: "window",
    GroupKind.CHUNKED: "chunk",
    GroupKind.MLA: "latent",
    GroupKind.STATE: "state",
}


def show(forecast: Forecast, console: Console) -> None:
    """Print the forecast of a handover: both engines, a table with one row per kind of layer, and notes."""
    for line in _heading(forecast):
        console.print(line, highlight=False)
    console.print()
    console.print(_table(forecast))
    console.print("[dim]A run is contiguous in both engines: one NIXL descriptor.[/]", highlight=False)
    console.print(
        "[dim]Next: --html FILE draws the transfer, kvferry bench transfer measures it.[/]", highlight=False
    )
    if forecast.notes:
        console.print()
    for note in forecast.notes:
        console.print(f"[dim]Note: {escape(note)}.[/]", highlight=False)


def describe(cache: LayerCache) -> str:
    """Return a short name for a kind of layer, such as ``full attention``, ``window 1,024`` or ``latent``.

    Args:
        cache: KV cache of a layer of this kind.
    """
    name = cache.fields[0].name if cache.kind is GroupKind.MLA else _NAMES[cache.kind]
    return f"{name} {cache.attention_span:,}" if cache.attention_span else name


def _heading(forecast: Forecast) -> Iterator[str]:
    yield f"[bold]{escape(forecast.model)}[/], a prompt of {forecast.tokens:,} tokens"
    sides = zip((forecast.source, forecast.destination), forecast.blocks, strict=True)
    here, there = (engine(side, tokens) for side, tokens in sides)
    yield f"from {here} to {'the same' if here == there else there}"
    kept = [f"{format_bytes(forecast.token_bytes)} per token"] if forecast.token_bytes else []
    kept += [f"{format_bytes(forecast.state_bytes)} of state per sequence"] if forecast.state_bytes else []
    yield f"KV cache: {' and '.join(kept)}"


def engine(side: EngineSide, block_tokens: int) -> str:
    """Return a short description of an engine: parallel sizes, layout and block size.

    Args:
        side: settings of the engine.
        block_tokens: number of tokens per block.
    """
    return f"{side.label}, blocks of {block_tokens:,}"


def _table(forecast: Forecast) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    left = {"layers", "method"}
    for title in (
        "layers",
        "per token\nor state",
        "run\nlength",
        "runs",
        "moved",
        "of full\nattention",
        "method",
        "time",
    ):
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True, vertical="bottom")
    for cells in table_cells(forecast):
        table.add_row(*cells, style="bold" if cells[0] == _ALL else None)
    return table


def table_cells(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table that shows a forecast. A row is a tuple of texts, one per column.

    There is one row per kind of layer. If there are several kinds, a row for all layers follows.
    """
    for row in forecast.rows:
        kept = format_bytes(row.layers * row.cache.bytes_of(1))
        yield f"{row.layers} {describe(row.cache)}", kept, *_estimate_cells(row.estimate)
    if len(forecast.rows) > 1:
        yield _ALL, "", *_estimate_cells(forecast.whole)


def _estimate_cells(estimate: TransferEstimate) -> Iterator[str]:
    yield format_bytes(estimate.run_bytes)
    yield format_count(estimate.descriptors)
    yield format_bytes(estimate.bytes)
    yield "" if not estimate.full_bytes else f"{estimate.bytes / estimate.full_bytes:.0%}"
    yield estimate.strategy
    yield format_seconds(estimate.seconds)


def show_table(console: Console) -> None:
    """Print each model of the built-in table with its kinds of layers and the origin of its configuration."""
    for entry in entries():
        reading = read_model(entry.config)
        kinds = Counter(reading.cache.layers)
        kinds_text = ", ".join(f"{count} {describe(cache)}" for cache, count in kinds.items())
        also = f" (also {', '.join(entry.also)})" if entry.also else ""
        console.print(f"[bold]{escape(entry.name)}[/]{escape(also)}: {kinds_text}")
        console.print(Padding(f"[dim]{escape(entry.source)}[/]", (0, 0, 0, 2)))
