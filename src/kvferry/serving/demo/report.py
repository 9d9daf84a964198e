"""The demo's result table: each request's KV load, and the comparison of its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from kvferry.serving.demo.transfers import Transfer
from kvferry.serving.demo.verdict import AnswerVerdict
from kvferry.units import format_bytes, format_seconds

_WIDE = 120


@dataclass(frozen=True, slots=True)
class RequestRow:
    """The result of one request of the demo: its KV load and the comparison of its answer.

    Attributes:
        prompt_tokens: length of the prompt, in tokens.
        transfer: KV load of the request; None if nothing was loaded.
        first_token_seconds: time to first token that the client measured, in seconds.
        verdict: result of the comparison with a single engine.
    """

    prompt_tokens: int
    transfer: Transfer | None
    first_token_seconds: float
    verdict: AnswerVerdict


def table(rows: Sequence[RequestRow], width: int) -> Table:
    """Return the demo's result table, with one row per request.

    Each row lists the bytes of KV that were moved: per KV cache group if the console has at least 120
    characters per line, otherwise per kind of attention. The wide table also has columns for the planning
    time and the total load time. The narrow table needs 80 characters per line.

    Args:
        rows: results in the order of the requests.
        width: width of the console, in characters.
    """
    wide = width >= _WIDE
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    columns = ["prompt\ntokens", "KV moved\nby group", "if all\nfull", "\npieces", "piece\nsize"]
    columns += ["\nplanning", "\ntransfer", "load\nin all"] if wide else ["\ntransfer"]
    columns += ["first\ntoken", "same\ntokens"]
    for name in columns:
        left = name.startswith(("KV", "same"))
        shown.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*_cells(row, wide=wide), end_section=True)
    return shown


def summary(rows: Sequence[RequestRow]) -> str:
    """Return a paragraph that summarizes the results of all requests.

    It gives the number of bytes of KV that were moved, the number that would have been moved if all layers
    had full attention, and the number of answers that are identical to a single engine's answers.

    Args:
        rows: results of all requests.
    """
    loads = [row.transfer for row in rows if row.transfer and row.transfer.outcome == "ready"]
    moved, full = sum(load.bytes for load in loads), sum(load.full_attention_bytes for load in loads)
    same = Counter(row.verdict for row in rows)
    text = f"Moved {format_bytes(moved)} for {len(loads)} of {len(rows)} requests"
    if moved < full:
        text += (
            f"; all layers as full attention would have been {format_bytes(full)}, "
            f"{full / moved:.1f} times that"
        )
    text += f". Identical to a single engine: {same[AnswerVerdict.YES]} of {len(rows)}."
    if same[AnswerVerdict.OWN_GAP]:
        text += f" {same[AnswerVerdict.OWN_GAP]} differ where that engine, asked to prefill what it decoded,"
        text += " differs from itself by as much (own gap)."
    return text


def failures(rows: Sequence[RequestRow]) -> Iterator[str]:
    """Yield a sentence for each request whose prompt the decode engine computed itself, with the reason.

    Args:
        rows: results in the order of the requests. A sentence names its request by its number, from 1.
    """
    for number, row in enumerate(rows, 1):
        load = row.transfer
        if load is None:
            yield f"Request {number}: nothing was loaded; the decode engine computed its prompt."
        elif load.outcome != "ready":
            why = f"the load {load.outcome} ({load.reason})"
            yield f"Request {number}: {why}; the decode engine computed its prompt."


def _cells(row: RequestRow, *, wide: bool) -> Iterator[str]:
    load = row.transfer
    yield str(row.prompt_tokens)
    if load is None or load.outcome != "ready":
        yield "nothing" if load is None else load.outcome
        yield from ["-"] * (6 if wide else 4)
    else:
        yield "\n".join(_groups(load, wide=wide))
        yield format_bytes(load.full_attention_bytes)
        yield str(load.descriptors)
        yield format_bytes(load.run_bytes)
        if wide:
            yield format_seconds(load.plan_seconds)
        yield format_seconds(load.transfer_seconds)
        if wide:
            yield format_seconds(load.total_seconds)
    yield format_seconds(row.first_token_seconds)
    yield row.verdict.value


def _groups(load: Transfer, *, wide: bool) -> Iterator[str]:
    """Yield lines of text that state how many bytes a KV load moved.

    Args:
        load: KV load of a request.
        wide: True for one line per KV cache group, False for one line per kind of attention.
    """
    if wide:
        for name, moved in load.bytes_by_group.items():
            yield f"{name}  {format_bytes(moved)}"
        return
    kinds: dict[str, list[int]] = {}
    for name, moved in load.bytes_by_group.items():
        kinds.setdefault(name.partition(" ")[2], []).append(moved)
    for kind, sizes in kinds.items():
        yield f"{len(sizes)} {_SHORT.get(kind, kind).replace('_window', '')} {format_bytes(sum(sizes))}"


_SHORT = {"full_attention": "full"}
