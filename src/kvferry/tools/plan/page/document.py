"""The HTML file of a handover forecast: a table on top, then two pictures per kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from io import StringIO

from rich.console import Console

from kvferry.common.text import Report
from kvferry.common.units import counted
from kvferry.geometry.models import ModelReading
from kvferry.tools.plan.forecast import Forecast, LayerForecast
from kvferry.tools.plan.page.draw import COLOURS, drawing
from kvferry.tools.plan.page.scene import MAX_RANKS, Scene, scene
from kvferry.tools.plan.setting import PlannedTransfer, set_up
from kvferry.tools.plan.show import COLUMNS, describe, engine, result, table_cells

_TEXT_COLUMNS = 76

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2327;--dim:#5c666f;--line:#d5dbe0;
--l0:#3b6ea5;--l1:#7fa7cf;--l2:#3f8f7c;--l3:#86bfae;--l4:#8a6bb1;--l5:#b9a3d6;
--r0:#e08a2e;--r1:#c2478d;--r2:#6a9a2d;--r3:#c9443a;--r4:#2b93b8;--r5:#8d7a2a}
@media(prefers-color-scheme:dark){:root{--bg:#14181c;--fg:#e4e9ed;--dim:#9aa5ae;--line:#333b43;
--l0:#5b93d0;--l1:#2f5a88;--l2:#4fae98;--l3:#2b6657;--l4:#a78bd2;--l5:#5d4787;
--r0:#f0a14d;--r1:#e077b3;--r2:#93c653;--r3:#ee7469;--r4:#5bbcdd;--r5:#c4ae55}}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
body{overflow-wrap:break-word}
main{max-width:1080px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0}h2{font-size:19px;margin:36px 0 0}h3{font-size:16px;margin:18px 0 0}
p{margin:4px 0 8px}
.wide{overflow-x:auto;margin:14px 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td{white-space:nowrap}
th{font-weight:600;color:var(--dim)}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);text-align:right}
th{vertical-align:bottom}.left{text-align:left}th+.left,td+.left{padding-left:16px}
.note,section p{color:var(--dim)}.legend{display:flex;flex-wrap:wrap;gap:6px 26px;color:var(--dim)}
.legend i{display:inline-block;width:14px;height:10px;margin-right:2px}
svg{width:100%;height:auto;display:block;overflow:visible}
.ranks{display:flex;flex-wrap:wrap;gap:0 18px;font-size:14px;color:var(--dim)}.ranks span{flex:1 1 13em}
rect{stroke:var(--bg);stroke-width:.5}
.rule{fill:none;stroke:var(--dim);vector-effect:non-scaling-stroke}
path[class^=r]:not(.rule){fill-opacity:.38}path:not(.rule):hover{fill-opacity:.9}
rect:hover{opacity:.7}
pre{overflow-x:auto}
@media(max-width:600px){main{padding:16px}svg{height:220px}
table,thead,tbody{display:block}thead{display:none}
tr{display:grid;grid-template-columns:1fr 1fr;padding:10px 0;border-bottom:1px solid var(--line)}
td,td+.left{border:0;padding:2px 0;text-align:left}td:first-child{grid-column:1/3;font-weight:600}
td:not(:first-child)::before{content:attr(data-name);display:block;font-size:14px;color:var(--dim);white-space:normal}}
""" + "".join(
    f".l{n}{{fill:var(--l{n});background:var(--l{n})}}.r{n}{{fill:var(--r{n});background:var(--r{n})}}"
    for n in range(6)
)


def picture(
    forecast: Forecast, reading: ModelReading, *, separate: bool = False, more: Iterable[str] = ()
) -> str:
    """Return the HTML page that shows a handover forecast: a table, and pictures of the copied memory.

    Args:
        more: HTML of further parts, at the end of the page.
    """
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
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
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
    """Yield the HTML of the section for one kind of layer: a picture of all layers, then of one layer."""
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
