"""The demo's result table: each request's KV load, and the comparison of its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.tools.serving.demo.transfers import Transfer
from kvferry.tools.serving.demo.verdict import AnswerVerdict
from kvferry.table import Column
from kvferry.units import counted, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class RequestRow:
    """The result of one request of the demo.

    Attributes:
        transfer: KV load of the request; None if nothing was loaded.
        first_token_seconds: time to first token that the client measured.
        verdict: result of the comparison with a single engine.
    """

    prompt_tokens: int
    transfer: Transfer | None
    first_token_seconds: float
    verdict: AnswerVerdict


COLUMNS = (
    Column("prompt tokens"),
    Column("KV moved"),
    Column("by kind of layer", rank=2, left=True),
    Column("if all full", rank=4),
    Column("transfer time", rank=1),
    Column("first token", rank=3),
    Column("same text", left=True),
    Column("runs", rank=5),
    Column("run length", rank=6),
    Column("planning time", rank=7),
    Column("whole load", rank=8),
)

LEGEND = "A run is a byte range that is contiguous in both engines: one NIXL descriptor."


def table_cells(rows: Sequence[RequestRow]) -> list[tuple[str, ...]]:
    """Return the cells of the demo's result table, one tuple per request."""
    return [tuple(_cells(row)) for row in rows]


def story(rows: Sequence[RequestRow]) -> str:
    """Tell in two sentences what the engines did, and how much KV that took."""
    loads = [row.transfer for row in rows if row.transfer and row.transfer.outcome == "ready"]
    moved, full = sum(load.bytes for load in loads), sum(load.full_attention_bytes for load in loads)
    tokens = sum(row.prompt_tokens for row in rows)
    computed = f"The prefill engine computed {counted(len(rows), 'prompt')} of {tokens:,} tokens in all"
    if not loads:
        return f"{computed}; the decode engine read nothing of it and {_wrote(rows)}."
    which = "their KV" if len(loads) == len(rows) else f"the KV of {len(loads)} of them"
    seconds = format_seconds(sum(load.transfer_seconds for load in loads))
    text = (
        f"{computed}; the decode engine read {which}, {format_bytes(moved)}, in {seconds} and {_wrote(rows)}."
    )
    if moved >= full:
        return text
    return (
        f"{text} If every layer had full attention, it would have read {format_bytes(full)}, "
        f"{full / moved:.1f} times as much."
    )


def _wrote(rows: Sequence[RequestRow]) -> str:
    verdicts = Counter(row.verdict for row in rows)
    same, close = verdicts[AnswerVerdict.YES], verdicts[AnswerVerdict.OWN_GAP]
    if same == len(rows):
        return "wrote the same text as one engine alone"
    text = f"wrote the same text as one engine alone for {same} of {counted(len(rows), 'prompt')}"
    if close:
        text += (
            f" ({close} differ no more than that engine differs from itself when it prefills what "
            "it decoded: own gap)"
        )
    return text


def failures(rows: Sequence[RequestRow]) -> Iterator[str]:
    """Yield a sentence for each request whose prompt the decode engine computed itself, with the reason."""
    for number, row in enumerate(rows, 1):
        load = row.transfer
        if load is None:
            yield f"Request {number}: nothing was loaded; the decode engine computed its prompt."
        elif load.outcome != "ready":
            why = f"the load {load.outcome} ({load.reason})"
            yield f"Request {number}: {why}; the decode engine computed its prompt."


def _cells(row: RequestRow) -> Iterator[str]:
    load = row.transfer
    yield f"{row.prompt_tokens:,}"
    if load is None or load.outcome != "ready":
        yield "nothing" if load is None else load.outcome
        yield from [""] * 3
    else:
        yield format_bytes(load.bytes)
        yield "\n".join(_kinds(load))
        yield format_bytes(load.full_attention_bytes)
        yield format_seconds(load.transfer_seconds)
    yield format_seconds(row.first_token_seconds)
    yield row.verdict.value
    if load is None or load.outcome != "ready":
        yield from [""] * 4
    else:
        yield f"{load.descriptors:,}"
        yield format_bytes(load.run_bytes)
        yield format_seconds(load.plan_seconds)
        yield format_seconds(load.total_seconds)


def _kinds(load: Transfer) -> Iterator[str]:
    """Yield per kind of KV cache group: the number of groups, the kind, and the bytes that moved."""
    kinds: dict[str, list[int]] = {}
    for name, moved in load.bytes_by_group.items():
        kinds.setdefault(name.partition(" ")[2], []).append(moved)
    for label, sizes in kinds.items():
        kind, _, span = label.partition("(")
        name = " ".join((_SHORT.get(kind, kind), span.rstrip(")"))).strip()
        yield f"{len(sizes)} {name}: {format_bytes(sum(sizes))}"


_SHORT = {"full_attention": "full", "sliding_window": "window", "chunked_local": "chunk"}
