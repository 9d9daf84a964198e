"""What an engine's requests leave in a recording: lengths, times, keys and where KV came from; no tokens."""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvferry.common.errors import Unnameable
from kvferry.connector.bids import PlaceTokens
from kvferry.connector.content import Adapters
from kvferry.connector.engine import CacheGroup, PlainRequest
from kvferry.connector.events import Arrived, Event, Finished, LoadOutcome, MissReason, Scheduled
from kvferry.geometry import GroupKind
from kvferry.keys import ChunkKeys, tenant_of
from kvferry.observe.line_file import LineFile
from kvferry.observe.recorder import RequestRecorder, recording_header, start_recording
from support.clock import Clock
from support.engine_info import made_up
from support.fake_engine import FakeEngine
from support.load_events import load_began, load_ended
from support.lora import adapter

UNIT, PROMPT = 16, 40
TEXT = list(range(1000, 1000 + PROMPT))


def header(*blocks: int, chunking: tuple[int, int, int | None] | None = None) -> dict[str, Any]:
    groups = tuple(
        CacheGroup(kind=GroupKind.FULL, attention_span=0, block_tokens=block) for block in blocks or (UNIT,)
    )
    labels = [f"{number} full_attention" for number in range(len(groups))]
    return recording_header(
        made_up(groups=groups, num_blocks=77, step_tokens=256), labels=labels, chunking=chunking, model="tiny"
    )


def recording(folder: Path, adapters: Adapters | None = None) -> FakeEngine:
    """An engine that records its requests in a file of its own."""
    engine = FakeEngine()
    engine.path, engine.unix = folder / f"{len([*folder.iterdir()])}.jsonl", Clock(1e9 + engine.clock.now)
    engine.recorder = start_recording(
        str(engine.path), header(), adapters or Adapters(), clock=engine.clock, unix_clock=engine.unix
    )
    assert engine.recorder is not None
    engine.events.subscribe(engine.recorder)
    return engine


def serve(engine: FakeEngine, request: PlainRequest, *events: Event, cached: int | None = 0) -> None:
    """Let a request arrive, let these events happen, schedule the request, and end it."""
    name = request.request_id
    engine.events.emit(Arrived(name, 100.0, tokens=request.num_prompt_tokens, sources=()))
    for event in events:
        engine.events.emit(event)
    if cached is not None:
        engine.events.emit(Scheduled(name, 101.0, cached, request.num_tokens))
    engine.recorder.finished(request)
    engine.events.emit(Finished(name, 102.0))


def recorded(engine: FakeEngine) -> list[dict[str, Any]]:
    """All lines but the header. The recording ends."""
    assert not len(engine.recorder)
    engine.events.emit(Arrived("another", 103.0, tokens=1, sources=()))
    assert len(engine.recorder) == 1, "an error has ended the recording"
    engine.recorder.close()
    return [json.loads(line) for line in engine.path.read_bytes().splitlines()[1:]]


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return recording(tmp_path)


def ask(name: str = "a", tokens: list[int] = TEXT, answer: int = 0, **more: Any) -> PlainRequest:
    return PlainRequest(
        request_id=name, prompt_token_ids=tokens, answer_token_ids=list(range(answer)), **more
    )


def digests(line: dict[str, Any]) -> list[bytes]:
    whole = b64decode(line["keys"])
    return [whole[at : at + 8] for at in range(0, len(whole), 8)]


def test_a_header_says_what_a_replay_needs_of_the_engine() -> None:
    assert header(48, 32, chunking=(96, 192, 1056)) == {
        "kvferry_trace": 1,
        "unit_tokens": 16,
        "chunk_tokens": 96,
        "block_tokens": [48, 32],
        "step_tokens": 256,
        "num_blocks": 77,
        "groups": ["0 full_attention", "1 full_attention"],
        "snapshot_tokens": 192,
        "first_snapshot_tokens": 1056,
        "model": "tiny",
    }
    assert (header()["chunk_tokens"], header()["snapshot_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("blocks", "chunk", "unit"),
    [
        ((64,), None, 64),
        ((64,), 96, 32),
        ((64, 256), None, 64),
        ((64, 1056), 2112, 32),
        ((64, 48), 192, 16),
        ((8,), 64, 16),
    ],
)
def test_units_divide_blocks_and_chunks_but_have_at_least_16_tokens(
    blocks: tuple[int, ...], chunk: int | None, unit: int
) -> None:
    assert header(*blocks, chunking=chunk and (chunk, chunk, None))["unit_tokens"] == unit


def test_a_request_is_one_line(engine: FakeEngine) -> None:
    engine.clock.now += 2.5
    serve(engine, ask(answer=10), cached=32)
    (line,) = recorded(engine)
    keys = ChunkKeys(UNIT, [*TEXT, *range(10)], salt="kvferry-recording-1 ")
    assert digests(line) == [key[:8] for key in keys.chunks()]
    assert b64decode(line.pop("prompt_key")) == keys.at(PROMPT)[:8]
    assert len(b64decode(line.pop("keys"))) == 3 * 8
    assert line == {
        "arrival": 1e9 + 100,
        "end": 1e9 + 102.5,
        "prompt_tokens": PROMPT,
        "output_tokens": 10,
        "session": "",
        "tenant": "",
        "local_tokens": 32,
        "loaded": {},
    }


def test_sessions_and_tenants_are_told_apart_and_not_named(tmp_path: Path) -> None:
    engine, lora = recording(tmp_path), adapter(tmp_path)
    for name, more in {
        "a": {"session_id": "s-1"},
        "b": {"session_id": "s-1"},
        "c": {"session_id": "s-2"},
        "d": {"session_id": "s-1", "cache_salt": "secret"},
        "e": {"adapter": lora},
    }.items():
        serve(engine, ask(name, **more))
    lines = recorded(engine)
    first, again, other, salted, adapted = (line["session"] for line in lines)
    assert first == again
    assert len({first, other, salted}) == 3
    assert adapted == ""
    tenants = ["", "", "", tenant_of("secret", None).hex(), tenant_of(None, lora.lora_name).hex()]
    assert [line["tenant"] for line in lines] == tenants
    text = engine.path.read_text()
    assert "secret" not in text
    assert "s-1" not in text


def test_equal_prompts_have_equal_keys_in_all_engines_unless_their_salts_differ(tmp_path: Path) -> None:
    keys = {}
    for name in "xy":
        engine = recording(tmp_path)
        serve(engine, ask("plain"))
        serve(engine, ask("salted", cache_salt="s"))
        serve(engine, ask("longer", tokens=[*TEXT, *range(20)]))
        keys[name] = [[*digests(line), line["prompt_key"]] for line in recorded(engine)]
    assert keys["x"] == keys["y"]
    plain, salted, longer = keys["x"]
    assert not set(plain) & set(salted)
    assert plain[:2] == longer[:2]
    assert plain[2] != longer[2]
    assert not {key[:8] for key in ChunkKeys(UNIT, TEXT).chunks()} & set(plain)


def test_a_request_of_an_adapter_has_keys_of_its_own(tmp_path: Path) -> None:
    adapters = Adapters()
    adapters.name = lambda lora: "" if lora is None else "digest"
    engine = recording(tmp_path, adapters)
    serve(engine, ask("plain"))
    serve(engine, ask("adapted", adapter=SimpleNamespace(lora_name="l")))
    plain, adapted = map(digests, recorded(engine))
    assert not set(plain) & set(adapted)


class _NamelessImage:
    offset, length = 3, 5

    def name(self) -> str:
        raise Unnameable("nobody knows what it shows")


@pytest.mark.parametrize("prompt", [PROMPT, 32])
@pytest.mark.parametrize(
    "more",
    [{"items": [_NamelessImage()]}, {"arrives_in_parts": True}, {"answer": 2}],
    ids=["image", "parts", "token"],
)
def test_a_request_whose_content_is_not_known_has_the_keys_of_no_other(
    engine: FakeEngine, prompt: int, more: dict[str, Any]
) -> None:
    tokens = [*TEXT[: prompt - 1], -1 if "answer" in more else 5]
    for name in "ab":
        serve(engine, ask(name, tokens=tokens, **{"answer": 10, **more}))
    first, second = recorded(engine)
    assert len(digests(first)) == len(digests(second)) == (prompt + first["output_tokens"]) // UNIT
    assert not set(digests(first)) & set(digests(second))
    assert (b64decode(first["prompt_key"]) == digests(first)[1]) == (prompt == 32)
    assert first["prompt_key"] != second["prompt_key"]


def test_tokens_of_loads_that_succeeded_are_counted_by_place(engine: FakeEngine) -> None:
    parts = PlaceTokens("host", 16), PlaceTokens("file", 4)
    loads = (
        load_began("a#1.0", "tiers", end=24, begin=4, parts=parts),
        load_began("a#1.1", "peer", end=39, begin=24),
    )
    serve(engine, ask(), *loads, *map(load_ended, loads), Scheduled("a", 101.0, 39, PROMPT, loads=loads))
    (line,) = recorded(engine)
    assert line["loaded"] == {"host": 16, "file": 4, "peer": 15}
    assert line["local_tokens"] == 4


def test_tokens_of_a_failed_load_are_not_counted(engine: FakeEngine) -> None:
    load = load_began("a#1", "peer", end=32, begin=8)
    failed = load_ended(load, outcome=LoadOutcome.FAILED, miss=MissReason.FAILED)
    serve(engine, ask(), load, failed, cached=8)
    (line,) = recorded(engine)
    assert (line["loaded"], line["local_tokens"]) == ({}, 8)


def test_after_a_preemption_nothing_is_counted_again(engine: FakeEngine) -> None:
    serve(
        engine,
        ask(),
        Scheduled("a", 100.5, 16, PROMPT),
        load_began("a#1", "tiers", end=39, begin=32),
        load_ended("a#1", "tiers"),
        cached=39,
    )
    (line,) = recorded(engine)
    assert (line["local_tokens"], line["loaded"]) == (16, {})


def test_tokens_loaded_by_another_connector_are_not_local(engine: FakeEngine) -> None:
    serve(engine, ask(), Scheduled("a", 100.5, 32, PROMPT, other_connector_tokens=24))
    (line,) = recorded(engine)
    assert line["local_tokens"] == 8


def test_a_request_that_was_aborted_while_it_waited_has_a_line(engine: FakeEngine) -> None:
    serve(engine, ask(), load_began("a#1", "tiers", end=32, begin=16), cached=None)
    serve(engine, ask(), cached=None)
    loading, queued = recorded(engine)
    assert (loading["local_tokens"], loading["loaded"], loading["output_tokens"]) == (16, {}, 0)
    assert (queued["local_tokens"], queued["loaded"], queued["output_tokens"]) == (0, {}, 0)


def test_refused_requests_and_those_from_before_the_recording_have_no_line(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    serve(engine, ask(was_rejected=True))
    engine.recorder.finished(ask("earlier"))
    for event in (load_began("earlier#1"), load_ended("earlier#1"), Scheduled("earlier", 1.0, 0, PROMPT)):
        engine.events.emit(event)
    assert recorded(engine) == []
    assert not caplog.records


def test_a_request_that_ends_without_its_tokens_is_forgotten(engine: FakeEngine) -> None:
    engine.events.emit(Arrived("a", 100.0, tokens=PROMPT, sources=()))
    assert len(engine.recorder) == 1
    engine.events.emit(Finished("a", 102.0))
    assert recorded(engine) == []


def test_ids_of_any_length_and_the_same_id_again_are_lines(engine: FakeEngine) -> None:
    for name in ("a", "a", "long" * 1000):
        serve(engine, ask(name))
    assert len(recorded(engine)) == 3


class GrowingRequest(PlainRequest):
    """A request whose tokens are one list, which grows while its line waits to be written."""

    all_tokens: ClassVar = [*TEXT, *range(8)]

    @property
    def all_token_ids(self) -> list[int]:
        return self.all_tokens


def test_tokens_are_copied_when_a_request_ends() -> None:
    late: list[Callable[[], bytes]] = []
    lines = SimpleNamespace(add=lambda line, size: late.append(line))
    recorder, request = (
        RequestRecorder(lines, UNIT, Adapters()),
        GrowingRequest(request_id="a", prompt_token_ids=TEXT, answer_token_ids=[0] * 8),
    )
    recorder(Arrived("a", 100.0, tokens=PROMPT, sources=()))
    recorder.finished(request)
    request.all_tokens[0] = 7
    (line,) = (json.loads(make()) for make in late)
    assert digests(line)[0] == ChunkKeys(UNIT, TEXT, salt="kvferry-recording-1 ").at(UNIT)[:8]


def test_an_error_costs_a_line_and_no_request(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        engine.events.emit(Arrived(name, 100.0, tokens=PROMPT, sources=()))
        engine.recorder.finished(SimpleNamespace(request_id=name))
    serve(engine, ask())
    assert len(recorded(engine)) == 1
    assert sum(record.levelno == logging.ERROR for record in caplog.records) <= 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no/such/folder/trace", "No such file or directory"),
        ("", "Is a directory"),
        ("\0", "embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_opened_is_one_warning(
    tmp_path: Path, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    assert start_recording(str(path), header(), Adapters()) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"record {path}: {says}; no requests are recorded"
    ]


def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    full = RequestRecorder(LineFile("record", "full", FileIO("/dev/full", "ab")), UNIT, Adapters())
    for name in "abc":
        full(Arrived(name, 1.0, tokens=PROMPT, sources=()))
        full.finished(ask(name))
    full.close()
    assert [record.getMessage() for record in caplog.records] == [
        "record: No space left on device; no more lines are written"
    ]


def test_a_wall_clock_that_is_set_back_changes_no_interval(engine: FakeEngine) -> None:
    engine.unix.now = 0.0
    serve(engine, ask())
    (line,) = recorded(engine)
    assert line["arrival"] > 1e6
