"""The transfer log: a line per load, and never a reason to stop."""

import json
import logging
import os

import pytest

pytest.importorskip("vllm")

from kvferry.connector.messages import Report
from kvferry.connector.peers.transfer_log import TransferLog
from kvferry.errors import ConfigError
from kvferry.planning.select import LoadSpan

LABELS = ["full_attention", "sliding_window(64)"]
SPAN = LoadSpan(have=16, total=116, prompt=117)
READY = Report(None, bytes_by_group=(1000, 200), pages=12, descriptors=3, run_bytes=512)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_load_is_one_line(tmp_path):
    path = tmp_path / "log.jsonl"
    log = TransferLog(str(path), LABELS, block_tokens=16, block_bytes=640.0)
    log.write("request", "P@host:1#2", SPAN, READY, 0.5)
    (line,) = lines(path)
    assert line["request_id"] == "request"
    assert line["outcome"] == "ready"
    assert line["reason"] is None
    assert line["tokens"] == 100
    assert line["bytes"] == 1200
    assert line["bytes_by_group"] == {"0 full_attention": 1000, "1 sliding_window(64)": 200}
    assert line["full_attention_bytes"] == 7 * 640, "tokens 16 to 116 lie in 7 blocks"
    assert line["total_seconds"] == 0.5


@pytest.mark.parametrize(
    ("report", "outcome"),
    [(Report("it broke"), "failed"), (Report("its deadline passed", late=True), "expired")],
)
def test_a_load_that_failed_says_how_and_why(tmp_path, report, outcome):
    path = tmp_path / "log.jsonl"
    TransferLog(str(path), LABELS, 16, 1.0).write("request", "P", SPAN, report, 0.5)
    (line,) = lines(path)
    assert (line["outcome"], line["reason"], line["bytes"]) == (outcome, report.failure, 0)


def test_lines_are_added_to_what_is_there(tmp_path):
    path = tmp_path / "log.jsonl"
    for name in ("a", "b"):
        TransferLog(str(path), LABELS, 16, 1.0).write(name, "P", SPAN, READY, 0.5)
    assert [line["request_id"] for line in lines(path)] == ["a", "b"]


def test_others_cannot_read_it_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        TransferLog(str(tmp_path / "log"), (), 4, 1.0)
    finally:
        os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_without_a_file_nothing_happens():
    TransferLog(None, LABELS, 16, 1.0).write("request", "P", SPAN, READY, 0.5)


@pytest.mark.parametrize(
    ("name", "says"), [("no/such/folder/log", "No such file or directory"), ("", "Is a directory")]
)
def test_a_file_that_cannot_be_opened_is_a_setting_to_change(tmp_path, name, says):
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        TransferLog(str(path), LABELS, 16, 1.0)
    assert str(caught.value) == f"transfer_log {path}: {says}; name a file that can be written"


def test_a_full_disk_stops_the_log_and_nothing_else(caplog):
    log = TransferLog("/dev/full", LABELS, 16, 1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.write("request", "P", SPAN, READY, 0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "transfer_log: No space left on device; no more lines are written"
    ]


def test_a_name_that_is_not_unicode_does_not_stop_anything(tmp_path):
    path = tmp_path / "log.jsonl"
    log = TransferLog(str(path), LABELS, 16, 1.0)
    log.write("\ud800", "P", SPAN, READY, 0.5)
    log.write("next", "P", SPAN, READY, 0.5)
    assert len(lines(path)) == 2
