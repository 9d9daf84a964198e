from __future__ import annotations

import codecs
import gzip
import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.trace.open import open_trace
from support.examples import examples

MOONCAKE = b'{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
BAILIAN = b'{"chat_id": 1, "timestamp": 0.5, "input_length": 17, "output_length": 3, "hash_ids": [1, 2]}\n'
BLOCKS = b'{"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}\n'
CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
RECORDED = (
    b'{"kvferry_trace":1,"unit_tokens":16}\n{"arrival":1.5,"end":2,"prompt_tokens":16,"output_tokens":2,'
    b'"keys":"AAAAAAAAAAE=","prompt_key":"AAAAAAAAAAE=","session":"","local_tokens":0,"loaded":{}}\n'
)
AIPERF = b'{"session_id": "a", "input_length": 17, "output_length": 3, "hash_ids": [1], "timestamp": 0}\n'
LMCACHE = (
    b'{"timestamp": 1.5, "request_id": "a", "model_name": "m", "chunk_size": 256, "seq_len": 300, '
    b'"dtypes": [], "shapes": [], "chunk_hashes": ["0xab"]}\n'
)
WEKA = (
    b'{"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "s", "in": 70, "out": 3, '
    b'"hash_ids": [1]}]}\n'
)
SPANS = (
    b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a","startTimeUnixNano":"1","attributes":[{"key":'
    b'"gen_ai.usage.input_tokens","value":{"intValue":"17"}}]}]}]}]}\n'
)
CONVERSATIONS = b'[\n  {"id": "a", "messages": [{"role": "user", "content": "Good day to you all"}]}\n]\n'
FORMATS = {
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "blocks": BLOCKS,
    "csv": CSV,
    "recorded": RECORDED,
    "aiperf": AIPERF,
    "lmcache": LMCACHE,
    "weka": WEKA,
    "spans": SPANS,
    "conversations": CONVERSATIONS,
}


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("name", FORMATS)
def test_the_first_line_tells_the_format(tmp_path, monkeypatch, name, pack, mark):
    content = pack(mark + FORMATS[name])
    (tmp_path / "trace").write_bytes(content)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for trace in (open_trace(tmp_path / "trace"), open_trace("-")):
        assert trace.format == name
        assert len(list(trace)) == 1
    assert trace.name == "standard input"


@pytest.mark.parametrize(
    ("name", "unit_tokens"), [("mooncake", 300), ("csv", 300), ("blocks", 64), ("recorded", 16)]
)
def test_given_units_count_where_a_trace_does_not_state_them(tmp_path, name, unit_tokens):
    (tmp_path / "trace").write_bytes(FORMATS[name])
    trace = open_trace(str(tmp_path / "trace"), unit_tokens=300)
    assert trace.unit_tokens == unit_tokens
    assert [each.unit_tokens for each in trace] == [unit_tokens]


@pytest.mark.parametrize("unit_tokens", [0, -1, 1 << 25])
def test_units_out_of_bounds_are_refused(unit_tokens):
    with pytest.raises(
        ConfigError, match=f"--unit-tokens is {unit_tokens}; give a number from 1 to 16,777,216"
    ):
        open_trace("missing", unit_tokens)


def test_a_file_in_no_known_format_is_refused_with_its_first_line_and_the_formats(tmp_path):
    (tmp_path / "notes").write_bytes(b"\n\x1b[31m\xff" + b"x" * 500 + b"\nmore")
    with pytest.raises(ConfigError) as caught:
        open_trace(tmp_path / "notes")
    message = str(caught.value)
    assert message.isprintable()
    assert "it begins with \\x1b[31m" in message
    assert len(message) < 600
    for known in (
        "hash_ids",
        "Mooncake",
        "AIPerf",
        "LMCache",
        "Weka",
        "OpenTelemetry",
        "vLLM",
        "CSV",
        "recorded",
    ):
        assert known in message


KEYS = st.sampled_from(
    [
        *("hash_ids", "input_length", "timestamp", "output_length", "block_size", "block_tokens", "chat_id"),
        *("kvferry_trace", "unit_tokens", "session_id", "delay", "chunk_hashes", "requests", "resourceSpans"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=2),
)
WORDS = st.sampled_from(
    [
        *(
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b'"',
            b"\n",
            b"\r",
            b" ",
            b"0",
            b"-1",
            b"1e9",
            b"null",
            b"\xff",
        ),
        *(b"\0", b'"hash_ids":', b'"input_length":', b'"kvferry_trace":1', b"\x1f\x8b"),
    ]
)


def outcome(path):
    try:
        return [turn for first in open_trace(path) for turn in (first, *first.later)]
    except ConfigError as error:
        return str(error)


@examples(60)
@given(
    st.sampled_from([b"", *FORMATS.values()]),
    st.lists(WORDS | st.binary(max_size=8), max_size=20),
    st.integers(0, 400),
    st.sampled_from([b"", *FORMATS.values()]),
)
@example(b"", [b"[" * 100_000], 0, b"")
@example(b'{"hash_ids":', [b"[" * 100_000], 12, b"")
@example(b'{"a":', [b'{"a":' * 100_000], 5, b"")
@example(b"", [b'{"hash_ids":[', b"9" * 5000, b'],"input_length":1,"block_size":1}'], 0, b"")
@example(b"", [b'{"hash_ids":[', b"9" * 4299, b'],"input_length":1,"block_size":1}'], 0, b"")
@example(b"", [b'{"hash_ids":["\\ud800"],"input_length":1,"block_size":1}'], 0, b"")
@example(b"", [b'{"hash_ids":["', b"9" * 5000, b'"],"input_length":1,"block_size":1}'], 0, b"")
@example(BLOCKS, [b'{"x":', b"[" * 100_000], 99, b"")
@example(BLOCKS, [b'{"hash_ids":["\xff"],"input_length":1,"block_size":1}'], 99, b"")
@example(CSV, [b"0001-01-01 00:00:00+14:00,1,1\n"], len(CSV), b"")
@example(b"arrival,prompt_tokens,output_tokens\n", [b"0001-01-01T00:00:00+14:00,1,1\n"], 99, b"")
def test_any_file_is_read_or_refused(tmp_path_factory, start, middle, length, end):
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(start[:length] + b"".join(middle) + end)
    found = outcome(path)
    assert isinstance(found, list) or found.isprintable()


@examples(100)
@given(st.sampled_from([BLOCKS, AIPERF, LMCACHE, WEKA, SPANS]), st.dictionaries(KEYS, VALUES, max_size=2))
def test_any_object_is_read_or_refused(tmp_path_factory, start, change):
    path = tmp_path_factory.getbasetemp() / "any object"
    path.write_text(json.dumps(json.loads(start) | change))
    found = outcome(path)
    assert isinstance(found, list) or found.isprintable()
