from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.tools.serving.demo.report import (
    AnswerVerdict,
    RequestRow,
    Screen,
    Transfer,
    read_transfer,
    story,
)

LINE = {
    "request_id": "cmpl-abc-0",
    "outcome": "ready",
    "tokens": 1177,
    "bytes": (40 << 10) + 96,
    "bytes_by_group": {
        "0 full_attention": (30 << 10) + 96,
        "1 sliding_window(4096)": 5 << 10,
        "2 sliding_window(4096)": 5 << 10,
    },
    "full_attention_bytes": (97 << 10) + 1000,
    "reads": 1,
    "descriptors": 10240,
    "pages": 10,
    "run_bytes": 1023 << 10,
    "plan_seconds": 0.0001,
    "transfer_seconds": 0.123,
    "total_seconds": 0.2,
    "peer": "a:1",
    "reason": None,
}


def transfer(**changed: object) -> Transfer:
    known = {name: LINE[name] for name in Transfer.__struct_fields__}
    return Transfer(**{**known, **changed})


def printed(rows: list[RequestRow], width: int | None) -> str:
    out = io.StringIO()
    Screen(Console(file=out), width).results(rows)
    return out.getvalue()


def test_a_row_without_limit_is_one_line() -> None:
    lines = printed([RequestRow(131072, transfer(), 12.34, AnswerVerdict.OWN_GAP)], None).splitlines()
    assert re.split(" {2,}", lines[-2].strip()) == [
        "131,072", "40.09 KiB", "1 full: 30.09 KiB, 2 window 4096: 10 KiB", "97.98 KiB", "123 ms", "12.3 s",
        "own gap", "10,240", "1023 KiB", "100 µs", "200 ms",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 130, None])
def test_a_request_that_moved_no_kv_is_listed_and_not_counted(width: int | None) -> None:
    failed = transfer(outcome="expired", reason="no answer in 30 s")
    text = printed(
        [RequestRow(70, None, 0.1, AnswerVerdict.YES), RequestRow(71, failed, 0.1, AnswerVerdict.NO)], width
    )
    assert "nothing" in text
    assert "Request 1: nothing was loaded" in text
    assert "Request 2: the load expired (no answer in 30 s)" in text
    assert "read nothing of it and wrote the same text as one engine alone for 1 of 2" in " ".join(
        text.split()
    )


@pytest.mark.parametrize("width", [80, None])
def test_the_word_run_is_explained_below_the_table(width: int | None) -> None:
    text = printed([RequestRow(70, transfer(), 0.1, AnswerVerdict.YES)], width)
    assert "runs" in text
    assert text.splitlines()[-1] == (
        "A run is a byte range that is contiguous in both engines: one NIXL descriptor."
    )


def test_two_sentences_say_what_happened() -> None:
    assert story([RequestRow(70, transfer(), 0.1, AnswerVerdict.YES)] * 2) == (
        "The prefill engine computed 2 prompts of 140 tokens in all; the decode engine read their KV, "
        "80.19 KiB, in 246 ms and wrote the same text as one engine alone. If every layer had full "
        "attention, it would have read 196 KiB, 2.4 times as much."
    )


def test_answers_that_differ_are_counted() -> None:
    rows = [RequestRow(70, transfer(), 0.1, verdict) for verdict in AnswerVerdict]
    assert "wrote the same text as one engine alone for 1 of 3 prompts (1 differ no more than" in story(rows)


def test_the_load_that_served_a_request_is_found_by_the_clients_id(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_transfer(log, "abc") is None
    lines = [{**LINE, "outcome": "failed"}, {**LINE, "tokens": 5}, {**LINE, "outcome": "expired"}]
    lines.append({**LINE, "request_id": "cmpl-other-0", "tokens": 6})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_transfer(log, "abc").tokens == 5
    assert read_transfer(log, "other").tokens == 6
    assert read_transfer(log, "none") is None


def test_a_load_that_failed_is_found_when_no_other_did_better(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps({**LINE, "outcome": "failed", "reason": "why"}) + "\n")
    assert read_transfer(log, "abc").reason == "why"


def test_an_answer_is_one_line_without_what_a_terminal_would_act_on() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out), 40)
    screen.asked(1, "The prompt\n" * 9)
    with screen.answering("pair") as on_text:
        for piece in ("\x1b[31mred\n", "[bold]", "x" * 100, "y" * 100):
            on_text(piece)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].endswith(" ...")
    assert lines[2].startswith("    pair    [31mred [bold]xxx")
    assert lines[2].endswith("x...")
    assert max(map(len, lines)) <= 40


def test_a_short_question_is_shown_whole() -> None:
    out = io.StringIO()
    Screen(Console(file=out), 40).asked(12, "What is 2 + 3?")
    assert out.getvalue() == "\n 12 What is 2 + 3?\n"
