"""The transfer log: a line per load from a peer. The engine does not stop with it."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.events import Event, LoadOutcome, MissReason
from kvferry.geometry import Group, GroupKind, Layer, RankGeometry, Region
from kvferry.observe.line_file import TransferLog
from kvferry.transport.read_plan import LoadFigures
from support.load_events import load_began, load_ended
from support.pages import kv_page

PAGE = kv_page()
BLOCK = PAGE.block_tokens
RANK = RankGeometry(
    0, 1, 0, 1, 8,
    (
        Group(GroupKind.FULL, BLOCK, 0, (Layer("a", 4096, PAGE.page_bytes, PAGE),)),
        Group(GroupKind.SLIDING, BLOCK, 64, (Layer("b", 65536, PAGE.page_bytes, PAGE),)),
    ),
    (Region(4096, 1 << 20),),
)  # fmt: skip
FIGURES = LoadFigures(
    bytes_by_group=(1000, 0),
    strategies_by_group=(("direct",), ()),
    pages=12,
    descriptors=3,
    reads=2,
    run_bytes=512,
    plan_seconds=0.1,
    transfer_seconds=0.2,
    check_seconds=0.05,
    read_bytes_per_second=2e8,
)


def load(
    name: str = "request",
    outcome: LoadOutcome = LoadOutcome.READY,
    failure: str = "",
    figures: LoadFigures = FIGURES,
    source: str = "peer",
) -> tuple[Event, Event]:
    """The two events of a load of a hundred tokens."""
    key = f"{name}#1.0"
    miss = MissReason.FAILED if failure else None
    began = load_began(key, source, end=116, begin=16, at=1.0, peer="P@host:1#2")
    return began, load_ended(began, outcome=outcome, at=1.5, miss=miss, failure=failure, figures=figures)


def written(path: Path, *loads: tuple[Event, Event]) -> list[dict[str, Any]]:
    """The lines that a new log adds to a file for these loads."""
    log = TransferLog(str(path), [RANK])
    before = len(path.read_bytes().splitlines())
    for event in (event for both in loads for event in both):
        log(event)
    log.close()
    return [json.loads(line) for line in path.read_bytes().splitlines()[before:]]


def test_a_load_is_one_line(tmp_path: Path) -> None:
    blocks = -(-116 // BLOCK) - 16 // BLOCK
    (line,) = written(tmp_path / "log.jsonl", load())
    assert line == {
        "request_id": "request",
        "outcome": "ready",
        "reason": None,
        "peer": "P@host:1#2",
        "tokens": 100,
        "bytes": 1000,
        "bytes_by_group": {"0 full_attention": 1000, "1 sliding_window(64)": 0},
        "strategy_by_group": {"0 full_attention": "direct", "1 sliding_window(64)": ""},
        "full_attention_bytes": blocks * 2 * PAGE.content_bytes,
        "descriptors": 3,
        "pages": 12,
        "reads": 2,
        "run_bytes": 512,
        "plan_seconds": 0.1,
        "transfer_seconds": 0.2,
        "check_seconds": 0.05,
        "read_bytes_per_second": 2e8,
        "total_seconds": 0.5,
    }


@pytest.mark.parametrize("outcome", [LoadOutcome.FAILED, LoadOutcome.EXPIRED])
@pytest.mark.parametrize(("figures", "size"), [(LoadFigures(), 0), (FIGURES, 1000)])
def test_a_load_that_failed_says_how_and_why_and_what_it_moved(
    tmp_path: Path, outcome: LoadOutcome, figures: LoadFigures, size: int
) -> None:
    (line,) = written(tmp_path / "log", load(outcome=outcome, failure="it broke", figures=figures))
    assert (line["outcome"], line["reason"], line["bytes"]) == (outcome, "it broke", size)


def test_loads_from_tiers_and_dropped_loads_have_no_line(tmp_path: Path) -> None:
    dropped = load("b", LoadOutcome.DROPPED, "another part of the prefix has failed")
    lines = written(tmp_path / "log", load("a", source="tiers"), dropped, load("c"))
    assert [line["request_id"] for line in lines] == ["c"]


def test_loads_under_way_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = TransferLog(str(path), [RANK])
    (began, ended), (other_began, other_ended) = load("a"), load("b")
    references = sys.getrefcount(began)
    for event in (began, other_began, ended, other_ended):
        log(event)
    log.close()
    assert sys.getrefcount(began) == references, "its memory is free"
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_lines_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for name in ("a", "b"):
        assert [line["request_id"] for line in written(path, load(name))] == [name]
    assert len(path.read_text().splitlines()) == 2


def test_the_log_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        TransferLog(str(tmp_path / "log"), [RANK]).close()
    finally:
        os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_was_closed_writes_nothing(tmp_path: Path) -> None:
    log = TransferLog(str(tmp_path / "log"), [RANK])
    log.close()
    for event in load():
        log(event)
    log.close()
    assert (tmp_path / "log").read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "says"), [("no/such/folder/log", "No such file or directory"), ("", "Is a directory")]
)
def test_a_file_that_cannot_be_opened_is_a_setting_to_change(tmp_path: Path, name: str, says: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        TransferLog(str(path), [RANK])
    assert str(caught.value) == f"transfer_log {path}: {says}; name a file that can be written"


def test_a_full_disk_stops_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = TransferLog("/dev/full", [RANK])
    with caplog.at_level(logging.WARNING):
        for event in load() * 3:
            log(event)
        log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "transfer_log: No space left on device; no more lines are written"
    ]


def test_a_request_id_that_is_not_unicode_is_escaped(tmp_path: Path) -> None:
    lines = written(tmp_path / "log.jsonl", load("\ud800\x1b"), load("next"))
    assert [line["request_id"] for line in lines] == [r"\ud800\x1b", "next"]
