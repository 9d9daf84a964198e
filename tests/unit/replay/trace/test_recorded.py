from __future__ import annotations

import base64
import errno
import gzip
import io
import json
import tempfile
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.base import RecordedHits, TraceFile
from kvferry.tools.replay.trace.recorded import RecordedTrace
from support.examples import examples

HEADER = {"kvferry_trace": 1, "unit_tokens": 16, "model": "m", "groups": ["full"]}
START = 1764240000.0


def packed(*keys: int) -> str:
    return base64.b64encode(b"".join(key.to_bytes(8, "little") for key in keys)).decode()


def record(arrival: float, seconds: float = 1.0, **others: object) -> dict[str, object]:
    return {
        "arrival": START + arrival,
        "end": START + arrival + seconds,
        "prompt_tokens": 40,
        "output_tokens": 12,
        "keys": packed(1, 2, 2**64 - 3),
        "prompt_key": packed(7),
        "session": "",
        "local_tokens": 16,
        "loaded": {"host": 16, "file": 0},
        **others,
    }


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in records)


@pytest.fixture
def trace(tmp_path):
    def make(content: bytes) -> RecordedTrace:
        (tmp_path / "trace").write_bytes(content)
        return RecordedTrace(TraceFile(tmp_path / "trace"))

    return make


def test_a_request_has_the_keys_and_the_hits_that_were_recorded(trace):
    found = trace(
        lines(
            HEADER, record(0), record(0.5, session="talk", prompt_tokens=48, output_tokens=0, prompt_key="")
        )
    )
    first, second = found
    assert (found.format, found.unit_tokens, found.header) == ("recorded", 16, HEADER)
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0.0, 40, 12)
    assert first.prefix_ids.tolist() == [1, 2, 2**64 - 3]
    assert first.prompt_id == 7
    assert first.recorded == RecordedHits(16, {"host": 16, "file": 0})
    assert (second.arrival, second.session) == (0.5, "talk")
    assert found.notes() == []


def test_requests_are_sorted_by_arrival_however_long_they_took(trace):
    arrivals = [5.0, 3.0, 4000.0, 3.0, 0.0, *[7.0, 8.0] * 40]
    records = [record(each, local_tokens=n) for n, each in enumerate(arrivals)]
    places = [4, 1, 3, 0, *range(5, 85, 2), *range(6, 85, 2), 2]
    found = trace(lines(HEADER, *records))
    for _ in range(2):
        assert [each.arrival for each in found] == [arrivals[place] for place in places]
        assert [each.recorded.local_tokens for each in found] == places


def test_the_position_reaches_the_size_of_the_file(trace):
    content = lines(HEADER, *map(record, range(4)))
    found = trace(content)
    positions = [found.position() for _ in found]
    assert positions == [len(content) * share / 4 for share in (1, 2, 3, 4)]
    assert found.position() == found.length


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_unseekable_trace_is_copied(trace, monkeypatch, pack):
    content = pack(b"\n" + lines(HEADER, record(2), record(1), record(0)))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for found in (trace(content), RecordedTrace(TraceFile("-"))):
        assert [each.arrival for each in found] == [0.0, 1.0, 2.0]
        assert found.position() == len(content)
    with pytest.raises(ConfigError, match="standard input can be read only once"):
        list(found)


@pytest.mark.parametrize("call", ["TemporaryFile", "write"])
def test_a_full_disk_says_how_to_do_without_a_copy(trace, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.BytesIO):
        write = full

    monkeypatch.setattr(tempfile, "TemporaryFile", full if call == "TemporaryFile" else Full)
    with pytest.raises(
        ConfigError, match=r"^trace cannot be copied .*: No space left on device; free space, set"
    ):
        list(trace(gzip.compress(lines(HEADER, record(0)))))


TORN = lines(record(9))[:-30]


@pytest.mark.parametrize("end", [TORN, b"{", bytes(512)])
def test_a_last_line_that_a_killed_engine_left_incomplete_is_left_out(trace, end):
    found = trace(lines(HEADER, record(1), record(0)) + end)
    for _ in range(2):
        assert [each.arrival for each in found] == [0.0, 1.0]
        assert found.notes() == ["the last line is incomplete and was left out; the engine was writing it"]


def test_an_engine_that_is_started_again_repeats_the_header(trace):
    found = trace(lines(HEADER, record(1), HEADER, HEADER, record(0)))
    assert [each.arrival for each in found] == [0.0, 1.0]
    assert found.notes() == []


@examples(60)
@given(st.integers(0, 600))
def test_a_file_may_end_anywhere_after_its_header(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "torn"
    content = lines(record(1), record(0))
    path.write_bytes(lines(HEADER) + content[:length])
    found = RecordedTrace(TraceFile(path))
    rest = content[:length].rpartition(b"\n")[2]
    is_whole = rest in content.split(b"\n")
    assert len(list(found)) == content[:length].count(b"\n") + bool(rest and is_whole)
    assert len(found.notes()) == (not is_whole)


def test_a_broken_line_between_requests_is_refused(trace):
    found = trace(lines(HEADER, record(0)) + TORN + b"\n" + lines(record(1)))
    with pytest.raises(
        ConfigError, match=r"^trace, line 3: .*, in {\"arrival\":.*; correct or remove this line$"
    ):
        list(found)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"arrival": "now"}, "Expected `float`, got `str`"),
        ({"arrival": START * 1000}, "the request arrives at 1.76424e+12 s"),
        ({"prompt_tokens": 0}, "Expected `int` >= 1"),
        ({"keys": "?"}, "Invalid base64"),
        ({"keys": packed(1)}, "keys has 8 bytes; expected 8 for each of 3 units"),
        ({"keys": packed(1, 2, 3, 4)}, "keys has 32 bytes; expected 8 for each of 3 units"),
        ({"keys": packed(1, 2, 3) + "AAAA"}, "keys has 27 bytes"),
        ({"prompt_key": ""}, "prompt_key has 0 bytes; expected 8"),
        ({"loaded": {"host": -1}}, "Expected `int` >= 0"),
    ],
)
def test_a_wrong_record_is_refused_with_its_line(trace, change, problem):
    wrong = record(1) | change
    found = trace(lines(HEADER) + b"\n" + lines(wrong))
    with pytest.raises(ConfigError) as caught:
        list(found)
    assert str(caught.value).startswith("trace, line 3: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"kvferry_trace": 2},
            "the trace has version 2; this release of kvferry reads version 1; replay it with",
        ),
        ({"unit_tokens": 0}, "Expected `int` >= 1"),
        ({"unit_tokens": None}, "Expected `int`, got `null`"),
    ],
)
def test_a_wrong_header_is_refused(trace, change, problem):
    with pytest.raises(ConfigError) as caught:
        trace(lines(HEADER | change))
    assert f"trace, line 1: {problem}" in str(caught.value)


def test_an_engine_with_other_units_is_refused(trace):
    found = trace(lines(HEADER, record(0), HEADER | {"unit_tokens": 32}))
    with pytest.raises(
        ConfigError, match=r"^trace, line 3: the engine was started again with units of 32 tokens"
    ):
        list(found)
