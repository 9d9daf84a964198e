"""The demo's output: prompts and answers, how they compare, and the KV load of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
from rich.console import Console

from kvferry.common.text import printable
from kvferry.common.units import counted, format_bytes, format_seconds
from kvferry.tools.report import Column, Report
from kvferry.tools.serving.demo.client import StreamedAnswer
from kvferry.tools.serving.engine import EngineProcess
from kvferry.tools.serving.launch import startup_progress


class AnswerVerdict(StrEnum):
    """The result of comparing a prefill and decode engine's answer with a single engine's answer.

    YES: all tokens are equal. OWN_GAP: the single engine's numerical error can explain the difference. NO:
    the answers differ in another way.
    """

    YES = "yes"
    OWN_GAP = "own gap"
    NO = "NO"


def compare(
    pair: StreamedAnswer, single: StreamedAnswer, prefill: Callable[[Sequence[int]], Mapping[int, float]]
) -> AnswerVerdict:
    """Compare the answer of a prefill and a decode engine with the answer of a single engine.

    If one answer is the beginning of the other, the verdict is NO. Otherwise it depends on the first position
    at which the tokens differ. The single engine has computed the log probabilities there by decoding. It
    computes them again by prefilling its own answer up to this position. The *gap* is the largest difference
    between a token's two log probabilities. The verdict is OWN_GAP if decoding gave the two different tokens
    log probabilities that differ by at most twice the gap, else NO. It is also NO if the pair's token is not
    among the likeliest tokens of the single engine.

    Args:
        single: answer of the single engine, with the log probabilities of the likeliest tokens.
        prefill: function that prefills token ids on the single engine and returns the log probabilities of
            the next token, by token id.
    """
    if pair.tokens == single.tokens:
        return AnswerVerdict.YES
    pairs = zip(pair.tokens, single.tokens, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return AnswerVerdict.NO
    ours, theirs = pair.tokens[at], single.tokens[at]
    decoded = single.logprobs[at]
    if ours not in decoded:
        return AnswerVerdict.NO
    prefilled = prefill([*single.prompt, *single.tokens[:at]])
    common = decoded.keys() & prefilled.keys()
    gap = max((abs(decoded[token] - prefilled[token]) for token in common), default=0.0)
    # Each of the two tokens' log probabilities may be wrong by the gap, in opposite directions.
    return AnswerVerdict.OWN_GAP if decoded[theirs] - decoded[ours] <= 2 * gap else AnswerVerdict.NO


class Transfer(msgspec.Struct, frozen=True):
    """A finished KV load: one line of the transfer log.

    Attributes:
        request_id: id that the decode engine gave the request. It contains the id that the client sent.
        outcome: ``ready`` if the load succeeded, ``expired`` if it was not complete in time, ``failed`` if
            it failed for another reason.
        bytes: bytes of KV that were loaded, without gaps that are read and discarded.
        bytes_by_group: these bytes by the group's number and kind, such as ``0 full_attention``.
        full_attention_bytes: bytes that the load would have moved if all layers had full attention.
        reads: number of reads of the load: more than 1 if the KV was read while it was computed.
        descriptors: number of transfer descriptors, after adjacent ones are merged.
        run_bytes: length of the longest contiguous run that is transferred.
        transfer_seconds: time from posting the reads to their completion.
        total_seconds: time from the decode engine's first query about the request's KV until the loaded
            blocks are usable.
        reason: reason for the failure; None if the load succeeded.
    """

    request_id: str
    outcome: str
    tokens: int
    bytes: int
    bytes_by_group: dict[str, int]
    full_attention_bytes: int
    reads: int
    descriptors: int
    run_bytes: int
    plan_seconds: float
    transfer_seconds: float
    total_seconds: float
    peer: str
    reason: str | None


def read_transfer(log: Path, request_id: str) -> Transfer | None:
    """Return the last successful load of a request, or the last one if all failed; None if there is none."""
    if not log.exists():
        return None
    # The engine's id of a request contains the client's.
    lines = [line for line in log.read_bytes().splitlines() if request_id.encode() in line]
    loads = [msgspec.json.decode(line, type=Transfer) for line in lines]
    ready = [load for load in loads if load.outcome == "ready"]
    return ready[-1] if ready else loads[-1] if loads else None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """The result of one request of the demo. `transfer` is None if nothing was loaded."""

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

_LEGEND = "A run is a byte range that is contiguous in both engines: one NIXL descriptor."
_KINDS = {"full_attention": "full", "sliding_window": "window", "chunked_local": "chunk"}
_INDENT = "    "
# Width of lines with prompts and answers where the output is no terminal.
_EXCERPT = 80


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


def _failures(rows: Sequence[RequestRow]) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        load = row.transfer
        if load is None:
            yield f"Request {number}: nothing was loaded; the decode engine computed its prompt."
        elif load.outcome != "ready":
            why = f"the load {load.outcome} ({load.reason})"
            yield f"Request {number}: {why}; the decode engine computed its prompt."


def _cells(row: RequestRow) -> tuple[str, ...]:
    load = row.transfer
    moved, details = ["nothing" if load is None else load.outcome, "", "", ""], [""] * 4
    if load is not None and load.outcome == "ready":
        moved = [
            format_bytes(load.bytes),
            "\n".join(_kinds(load)),
            format_bytes(load.full_attention_bytes),
            format_seconds(load.transfer_seconds),
        ]
        details = [
            f"{load.descriptors:,}",
            format_bytes(load.run_bytes),
            format_seconds(load.plan_seconds),
            format_seconds(load.total_seconds),
        ]
    first_token = format_seconds(row.first_token_seconds)
    return f"{row.prompt_tokens:,}", *moved, first_token, row.verdict.value, *details


def _kinds(load: Transfer) -> Iterator[str]:
    """Yield per kind of KV cache group: the number of groups, the kind, and the bytes that moved."""
    kinds: dict[str, list[int]] = {}
    for name, moved in load.bytes_by_group.items():
        kinds.setdefault(name.partition(" ")[2], []).append(moved)
    for label, sizes in kinds.items():
        kind, _, span = label.partition("(")
        name = " ".join((_KINDS.get(kind, kind), span.rstrip(")"))).strip()
        yield f"{len(sizes)} {name}: {format_bytes(sum(sizes))}"


class Screen:
    """The demo's output. Prompts and answers are shortened to one line each."""

    def __init__(self, console: Console, width: int | None) -> None:
        self._console = console
        self._report = Report(console, width)
        self._line = _EXCERPT if width is None else width

    def note(self, text: str) -> None:
        for line in text.split("\n"):
            self._report.text(line)

    def model(self, title: str) -> None:
        self._console.print()
        self._report.heading(title)

    @contextmanager
    def starting(self) -> Iterator[Callable[[Sequence[EngineProcess]], None]]:
        with startup_progress(self._console) as show:
            yield show
        self.note("Both engines are ready.")

    def handshake(self, seconds: float) -> None:
        self.note(f"The engines met: the first request had its first token after {format_seconds(seconds)}.")

    def asked(self, number: int, prompt: str) -> None:
        text, room = printable(prompt, " "), self._line - len(_INDENT) - 4
        self.note(f"\n{number:>3} {text if len(text) <= room else text[:room] + ' ...'}")

    @contextmanager
    def answering(self, who: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that prints an answer piece by piece, cut to one line of the console."""
        begin = f"{_INDENT}{who:<5}  "
        room = self._line - len(begin) - len("...")
        self._piece(begin)

        def on_text(text: str) -> None:
            nonlocal room
            if room > 0:
                piece = printable(text, " ")[:room]
                room -= len(piece)
                self._piece(piece if room > 0 else f"{piece}...")

        try:
            yield on_text
        finally:
            self._console.print()

    def results(self, rows: Sequence[RequestRow]) -> None:
        self._report.text()
        self._report.heading("What happened")
        self._report.text(story(rows))
        self._report.text()
        self._report.table(COLUMNS, [_cells(row) for row in rows])
        self._report.text(_LEGEND)
        for failure in _failures(rows):
            self._report.text(failure)

    def _piece(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()
