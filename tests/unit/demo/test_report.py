from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.serving.demo.report import RequestRow, summary
from kvferry.serving.demo.screen import Screen
from kvferry.serving.demo.transfers import Transfer, read_transfer
from kvferry.serving.demo.verdict import AnswerVerdict

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


def printed(rows: list[RequestRow], width: int) -> str:
    out = io.StringIO()
    Screen(Console(file=out, width=width)).table(rows)
    return out.getvalue()


def test_the_table_fits_eighty_columns_and_cuts_no_number() -> None:
    text = printed([RequestRow(131072, transfer(), 12.34, AnswerVerdict.OWN_GAP)], 80)
    assert max(map(len, text.splitlines())) <= 80
    for cell in (
        "131072",
        "2 sliding(4096) 10 KiB",
        "1 full 30.09 KiB",
        "97.98 KiB",
        "10240",
        "1023 KiB",
        "12.3 s",
        "own gap",
    ):
        assert cell in text


def test_a_wide_terminal_shows_every_group_and_more_times() -> None:
    text = printed([RequestRow(70, transfer(), 0.1, AnswerVerdict.YES)], 130)
    for cell in ("1 sliding_window(4096)  5 KiB", "2 sliding_window(4096)  5 KiB", "100 µs", "200 ms"):
        assert cell in text


@pytest.mark.parametrize("width", [80, 130])
def test_what_did_not_move_is_said_and_not_counted(width: int) -> None:
    failed = transfer(outcome="expired", reason="no answer in 30 s")
    text = printed(
        [RequestRow(70, None, 0.1, AnswerVerdict.YES), RequestRow(71, failed, 0.1, AnswerVerdict.NO)], width
    )
    assert "nothing" in text
    assert "Request 1: nothing was loaded" in text
    assert "Request 2: the load expired (no answer in 30 s)" in text
    assert "for 0 of 2 requests" in text
    assert "single engine: 1 of 2" in text


def test_the_summary_says_how_much_less_moved() -> None:
    said = summary([RequestRow(70, transfer(), 0.1, AnswerVerdict.YES)] * 2)
    assert said.startswith("Moved 80.19 KiB for 2 of 2 requests")
    assert "196 KiB, 2.4 times that" in said


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
    with Screen(Console(file=out, width=40)).answering(1, "The prompt\n" * 9) as on_text:
        for piece in ("\x1b[31mred\n", "[bold]", "x" * 100, "y" * 100):
            on_text(piece)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("    ->  [31mred [bold]xxx")
    assert lines[2].endswith("x...")
    assert max(map(len, lines)) <= 40
