"""The HTML file of a handover forecast: a table on top, then two pictures per kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from io import StringIO

from rich.console import Console

from kvferry.common.units import counted
from kvferry.tools.models import ModelReading
from kvferry.tools.plan.forecast import Forecast, LayerForecast
from kvferry.tools.plan.page.draw import COLOURS, drawing
from kvferry.tools.plan.page.scene import MAX_RANKS, Scene, scene
from kvferry.tools.plan.setting import PlannedTransfer, set_up
from kvferry.tools.plan.show import COLUMNS, describe, engine, result, table_cells
from kvferry.tools.report import Report

_TEXT_COLUMNS = 76


def picture(
    forecast: Forecast, reading: ModelReading, *, separate: bool = False, more: Iterable[str] = ()
) -> str:
    """Return the HTML page of a handover: a table, pictures of the copied memory, and the HTML in `more`."""
    setting = set_up(reading, (forecast.source, forecast.destination), forecast.tokens, separate=separate)
    body = [*_heading(forecast), _table(forecast)]
    body += [f'<p class="note">Note: {escape(note)}.</p>' for note in forecast.notes]
    body.append(_legend())
    for number, row in enumerate(forecast.rows):
        body += _section(setting, number, row)
    body += more
    return html_page(f"{forecast.model}: KV cache hand-over", body)


def html_page(title: str, body: Sequence[str]) -> str:
    """Return an HTML page in the style of kvferry's pages, from a plain title and the HTML of its parts."""
    # The page loads no other files and runs no scripts.
    style = (files("kvferry.tools.plan.page") / "style.css").read_text().rstrip()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def text_block(print_text: Callable[[Report], None]) -> str:
    """Return the HTML of what a function prints to a report, as it stands in a terminal."""
    text = StringIO()
    print_text(Report(Console(file=text, width=_TEXT_COLUMNS), _TEXT_COLUMNS))
    return f"<pre>{escape(text.getvalue().strip(chr(10)))}</pre>"


def _heading(forecast: Forecast) -> Iterator[str]:
    yield f"<h1>{escape(forecast.model)}</h1>"
    here, there = (
        escape(engine(side, tokens))
        for side, tokens in zip((forecast.source, forecast.destination), forecast.blocks, strict=True)
    )
    yield (
        f"<p>A prompt of {counted(forecast.tokens, 'token')}, from {here} to {there}. Planned; nothing "
        "was run.</p>"
        f"<p><b>{escape('M' + result(forecast)[1:])}.</b></p>"
    )


def _table(forecast: Forecast) -> str:
    # On a narrow screen each row is a box, with a column's name above its number.
    kinds = ['class="left"' if column.left else 'class="number"' for column in COLUMNS]
    head = "".join(f"<th {kind}>{column.heading}</th>" for kind, column in zip(kinds, COLUMNS, strict=True))
    body = ""
    for cells in table_cells(forecast):
        for kind, column, cell in zip(kinds, COLUMNS, cells, strict=True):
            begin = "<tr>" if column is COLUMNS[0] else ""
            body += f'{begin}<td {kind} data-name="{column.heading}">{escape(cell) or "-"}</td>'
        body += "</tr>"
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend() -> str:
    layers, ranks = ("".join(f'<i class="{letter}{n}"></i>' for n in range(COLOURS)) for letter in "lr")
    return (
        f'<p class="legend"><span>{layers} layers of the group, in turns</span>'
        f"<span>{ranks} ranks of the destination, in turns</span>"
        "<span>A gap is memory of other blocks or layers. Lengths are to scale. "
        "With a mouse, point at anything to read what it is.</span></p>"
    )


def _section(setting: PlannedTransfer, number: int, row: LayerForecast) -> Iterator[str]:
    """Yield the HTML for one kind of layer: a picture of all layers, then of one layer."""
    yield f"<section><h2>{row.layers} {escape(describe(row.cache))}</h2>"
    group = setting.dst.kinds.index(number)
    for one_layer in (False, True):
        found = scene(setting, group, one_layer=one_layer)
        if found is None:
            yield f"<p>None of these layers is on the first {MAX_RANKS} ranks.</p>"
            break
        yield f"<h3>{_title(found, one_layer=one_layer)}</h3><p>{_caption(setting, row, found)}</p>"
        label = f"{describe(row.cache)}, source above, destination below"
        yield drawing(label, found.src, found.dst, found.ribbons)
    yield "</section>"


def _title(found: Scene, *, one_layer: bool) -> str:
    if one_layer:
        return f"One layer of it, {escape(found.layers[0])}"
    if len(found.layers) < found.of_layers:
        return f"A block, in the first {len(found.layers)} of {found.of_layers} layers"
    return f"A block, in all {found.of_layers} layers that share its block table"


def _caption(setting: PlannedTransfer, row: LayerForecast, found: Scene) -> str:
    above, below = counted(found.src_blocks, "block"), counted(found.dst_blocks, "block")
    parts = [f"{above} above, {below} below: {counted(found.runs, 'run')}"]
    if found.joined:
        parts.append("runs between the same two stretches are drawn as one")
    if row.tables > 1:
        parts.append(f"one of {row.tables} block tables")
    if max(len(setting.src.ranks), len(setting.dst.ranks)) > MAX_RANKS:
        parts.append(f"the first {MAX_RANKS} ranks of a side")
    return "; ".join(parts) + "."
