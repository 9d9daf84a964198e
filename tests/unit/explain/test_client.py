"""An engine's socket: correct answers to its user, and no harm from other clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError, ProtocolError
from kvferry.connector.bids import Bid, PlaceTokens
from kvferry.connector.events import (
    Arrived,
    DecisionReason,
    Event,
    Finished,
    GroupBytes,
    LeaseEnded,
    LeaseGranted,
    LoadOutcome,
    MissReason,
    Scheduled,
    SourceMiss,
    SourceRefused,
    SourcesAsked,
    StoreBegan,
    ValuedBid,
)
from kvferry.observe import socket_directory
from kvferry.observe.trace_server import (
    MAX_QUESTION_BYTES,
    EngineInfo,
    Question,
    TraceServer,
    decode_trace,
    matches_id,
)
from kvferry.observe.traces import RequestTrace, TraceBuffer
from kvferry.tools.cli.main import app
from kvferry.tools.explain.client import ask_engines
from kvferry.transport.read_plan import LoadFigures
from support.command_line import run_kvferry
from support.load_events import load_began, load_ended
from support.waiting import wait_for

SECONDS = 0.5


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "kvferry"


def socket_in(directory: Path) -> Path:
    """Return the path of the only engine's socket."""
    (path,) = directory.glob("*.sock")
    return path


def everything(name: str, at: float) -> tuple[Event, ...]:
    bid = Bid("peer", (PlaceTokens("peer", 10),), looking=True)
    lack = SourceMiss("tiers", MissReason.EVICTED, "full", "chunk 1 of full")
    return (
        Arrived(
            name,
            at,
            tokens=20,
            sources=("peer",),
            declined=(lack,),
            trace_headers=(("traceparent", "00-1-2-01"),),
        ),
        SourcesAsked(
            name,
            at,
            local_tokens=1,
            resumable_tokens=1,
            bids=(ValuedBid("peer", bid, 1.5),),
            compute_value=0.5,
            misses=(lack,),
            chosen=bid,
            why=DecisionReason.LOOKING,
        ),
        load := load_began(f"{name}#1", end=11, begin=1, at=at, peer="host:1", parts=bid.parts),
        load_ended(
            load,
            outcome=LoadOutcome.EXPIRED,
            at=at + 1.0,
            miss=MissReason.DEADLINE,
            failure="late",
            moved=(GroupBytes("full", "direct", 5),),
            figures=LoadFigures(
                bytes_by_group=(5, 0),
                strategies_by_group=(("direct",), ()),
                pages=3,
                descriptors=2,
                run_bytes=4,
                plan_seconds=0.1,
                transfer_seconds=0.2,
                check_seconds=0.3,
            ),
        ),
        SourceRefused(name, at, "peer", "late"),
        StoreBegan(name, at, f"store-{name}", "full", 2),
        Scheduled(name, at, 1, 20, loads=(load,)),
        Finished(name, at),
        granted := LeaseGranted(name, at, 19, 30.0),
        LeaseEnded(name, at, granted=granted, expired=True),
    )


def remembered(*names: str) -> TraceBuffer:
    found = TraceBuffer(100)
    for number, name in enumerate(names):
        for event in everything(name, time.monotonic() - 100 + number):
            found(event)
    return found


def engine(role: str = "decode") -> EngineInfo:
    return EngineInfo(kvferry="1.0", engine_id=f"engine-{role}", model="tiny", pid=7, role=role)


@pytest.fixture
def traces() -> TraceBuffer:
    """Traces that `answers` serves."""
    return remembered("cmpl-a-0-12345678", "cmpl-b-0-12345678")


@pytest.fixture
def answers(directory: Path, traces: TraceBuffer) -> Iterator[TraceServer]:
    serving = TraceServer(traces, engine(), 100, SECONDS)
    assert serving.error is None
    assert ask_engines(Question()).engines, "and it has looked for what others have left"
    yield serving
    serving.close()


def test_a_trace_arrives_unchanged(answers: TraceServer) -> None:
    (found,) = ask_engines(Question("a", 5)).traces
    trace = found.trace
    came = trace.events[0].at
    assert trace.events == tuple(
        e for e in everything("cmpl-a-0-12345678", came) if type(e) is not StoreBegan
    )
    assert trace.stored[0].ordered == 2
    assert (found.engine.remembered, found.engine.most) == (2, 100)
    assert found.arrived == pytest.approx(time.time() - 100, abs=60)


def test_traces_of_all_engines_are_sorted_by_arrival(answers: TraceServer) -> None:
    buffer = remembered("old", "cmpl-a-0-87654321")
    prefill = TraceServer(buffer, engine("prefill"), 100, SECONDS)
    for event in everything("cmpl-a-0-99999999", time.monotonic() - 1000):
        buffer(event)
    try:
        told = ask_engines(Question("a", 5)).traces
        assert [one.engine.role for one in told] == ["prefill", "decode", "prefill"]
        assert [one.trace.request_id[-2:] for one in told] == ["99", "78", "21"]
        assert len(ask_engines(Question("", 1)).traces) == 2, "one of each"
    finally:
        prefill.close()


def test_answers_are_read_in_one_thread(answers: TraceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that read a type for the first time, msgspec may crash the process."""
    readers = []

    def read(line: bytes) -> RequestTrace:
        readers.append(threading.current_thread())
        return decode_trace(line)

    monkeypatch.setattr("kvferry.tools.explain.client.decode_trace", read)
    assert len(ask_engines(Question()).traces) == len(readers) == 2
    assert set(readers) == {threading.current_thread()}


@pytest.mark.parametrize(
    ("request_id", "said", "known"),
    [
        ("cmpl-5f3a-0-1b2c3d4e", "cmpl-5f3a-0-1b2c3d4e", True),
        ("cmpl-5f3a-0-1b2c3d4e", "cmpl-5f3a", True),
        ("cmpl-5f3a-0-1b2c3d4e", "5f3a-0", True),
        ("0_chatcmpl-5f3a-1b2c3d4e", "chatcmpl-5f3a", True),
        ("0_generate-tokens-5f3a-1b2c3d4e", "5f3a", True),
        ("5f3a", "5f3", True),
        ("cmpl-my-own.id*-0-1b2c3d4e", "my-own.id*", True),
        ("cmpl-my-own-id-0-1b2c3d4e", "my.own", False),
        ("cmpl-5f3a-0-1b2c3d4e", "1b2c3d4e", False),
        ("cmpl-5f3a-0-1b2c3d4e", "f3a", False),
    ],
)
def test_a_request_is_found_by_the_id_that_its_client_saw_or_sent(
    request_id: str, said: str, known: bool
) -> None:
    assert matches_id(request_id, said) == known


def say(directory: Path, said: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60.0)
        client.connect(str(socket_in(directory)))
        client.sendall(said)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"{}x\n",
        b"\xff\xfe\n",
        b'{"find": 1}\n',
        b'{"find": "a", "most": 0}\n',
        b'{"find": "a", "most": 100000}\n',
        b'{"find": "a", "whatever": 1}\n',
        b"[" * 2000 + b"\n",
        b"x" * (MAX_QUESTION_BYTES + 1),
    ],
)
def test_a_malformed_question_is_refused_in_one_sentence(
    directory: Path, answers: TraceServer, said: bytes
) -> None:
    assert set(json.loads(say(directory, said))) == {"error"}
    assert ask_engines(Question("a")).traces, "the next one is answered"


def test_a_silent_or_deaf_client_is_dropped_at_its_deadline(
    directory: Path, traces: TraceBuffer, answers: TraceServer
) -> None:
    for said in (b"", b"{"):
        assert say(directory, said) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        for event in (e for n in range(90) for e in everything(f"{n}" + "x" * 400, 1.0)):
            traces(event)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect(str(socket_in(directory)))
        deaf.sendall(b"{}\n")
        assert ask_engines(Question("a"), 60.0).traces


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@only_root
def test_another_user_is_refused(directory: Path, answers: TraceServer) -> None:
    path = socket_in(directory)
    for each in (directory.parent, directory, path):
        each.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        # The socket keeps the user that connected it.
        if (child := os.fork()) == 0:
            with contextlib.suppress(OSError):
                os.setuid(12345)
                client.connect(str(path))
            os._exit(0)
        os.waitpid(child, 0)
        client.settimeout(60.0)
        client.sendall(b"{}\n")
        assert b"user 12345 asks, only 0 may" in client.recv(1 << 16)


def test_nobody_else_may_enter_the_directory(directory: Path, answers: TraceServer) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "made", ["open to others", "a file", "a link", pytest.param("another's", marks=only_root)]
)
def test_a_directory_that_is_not_private_is_not_used(
    directory: Path, made: str, caplog: pytest.LogCaptureFixture
) -> None:
    if made == "a file":
        directory.touch(0o600)
    elif made == "a link":
        (directory.parent / "elsewhere").mkdir(0o700)
        directory.symlink_to(directory.parent / "elsewhere")
    else:
        directory.mkdir(0o700)
        directory.chmod(0o770 if made == "open to others" else 0o700)
    if made == "another's":
        os.chown(directory, 12345, -1)
    serving = TraceServer(remembered(), engine(), 100)
    assert isinstance(serving.error, ConfigError)
    assert "kvferry explain cannot ask this engine: " in caplog.text
    serving.close()
    with pytest.raises(ConfigError, match=r"set XDG_RUNTIME_DIR|chmod 700"):
        ask_engines(Question())


def test_an_unusable_directory_hides_no_engine(
    directory: Path, answers: TraceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clients also look below /tmp, where a test must not plant anything.
    monkeypatch.setattr("kvferry.tools.explain.client.socket_directories", lambda: [planted, directory])
    (planted := directory.parent / "planted").mkdir(0o777)
    planted.chmod(0o777)
    found = ask_engines(Question("a"))
    assert len(found.traces) == 1
    assert "has mode 777" in found.problems[0]


def test_an_engine_with_too_long_a_path_logs_it_and_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = directory.parent / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    serving = TraceServer(remembered(), engine(), 100)
    assert "of a shorter name" in str(serving.error)
    assert not list((long / "kvferry").iterdir())


def test_an_engine_without_a_socket_logs_the_error_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    serving = TraceServer(remembered(), engine(), 100)
    assert "cannot make /proc/kvferry" in str(serving.error)
    assert "cannot make /proc/kvferry" in caplog.text
    serving.close()


def test_closing_survives_a_directory_that_became_a_file(directory: Path, answers: TraceServer) -> None:
    socket_in(directory).unlink()
    directory.rmdir()
    directory.touch()
    answers.close()


def test_a_runtime_directory_with_an_impossible_name_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/tmp/{'x' * 300}")
    assert [place.name for place in socket_directory.socket_directories()] == [f"kvferry-{os.getuid()}"]


def test_the_socket_of_an_ended_engine_is_removed(directory: Path, answers: TraceServer) -> None:
    mine = socket_in(directory)
    listening, path = socket_directory.listen(directory, "engine-gone")
    listening.close()
    (directory / "something else").touch()
    assert path.exists()
    assert len(ask_engines(Question()).engines) == 1
    assert sorted(directory.iterdir()) == sorted([mine, directory / "something else"])


def test_a_starting_engine_removes_sockets_of_ended_engines(directory: Path) -> None:
    directory.mkdir(0o700)
    listening, path = socket_directory.listen(directory, "engine-gone")
    listening.close()
    serving = TraceServer(remembered("a"), engine(), 100)
    wait_for(lambda: not path.exists())
    assert len(ask_engines(Question()).traces) == 1
    serving.close()


def test_a_closing_server_leaves_nothing_and_waits_for_no_client(directory: Path) -> None:
    threads = set(threading.enumerate())
    serving = TraceServer(remembered("a"), engine(), 100, seconds=3600.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(socket_in(directory)))
        serving.close()
    assert not list(directory.iterdir())
    wait_for(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"", "cut short"),
        (b"{}\n", "cannot be read"),
        (b'{"error": "no"}\n', "no"),
        (b"GET / HTTP/1.1\n", "cannot be read"),
        (b'{"error": "\xff"}\n', "cannot be read"),
        (b'{"kvferry": "\xff"}\n', "cannot be read"),
        (b'{"kvferry":"9","engine_id":"e","model":"m","pid":1,"role":"both"}\n{"request_id":"a"}\n', "trace"),
    ],
)
def test_a_malformed_answer_is_a_problem(
    directory: Path, answers: TraceServer, said: bytes, sentence: str
) -> None:
    with engine_that_says(directory, said):
        found = ask_engines(Question("a"))
    assert len(found.traces) == 1
    (problem,) = found.problems
    assert sentence in problem


@contextlib.contextmanager
def engine_that_says(directory: Path, said: bytes) -> Iterator[None]:
    """Answer one question with these bytes."""
    listening, _ = socket_directory.listen(directory, "engine-other")

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(100)
            connection.sendall(said)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listening.close()


def test_all_engines_share_one_deadline(directory: Path, answers: TraceServer) -> None:
    # Their names come first: if engines were asked in turn, no time would be left for the one that answers.
    hung = [socket_directory.listen(directory, f"engine--hung-{n}")[0] for n in range(20)]
    found = ask_engines(Question("a"), 2.0)
    assert len(found.traces) == 1
    assert found.problems == ("an engine did not answer: TimeoutError: timed out",) * 20
    for one in hung:
        one.close()


def test_a_full_queue_of_an_engine_is_retried_until_the_deadline(
    directory: Path,
) -> None:
    directory.mkdir(0o700)
    listening, path = socket_directory.listen(directory, "engine-busy")
    waiting: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting[-1].settimeout(0)
            waiting[-1].connect(str(path))
    assert ask_engines(Question(), 0.2).problems == (
        "an engine did not answer: TimeoutError: too many questions wait for it",
    )

    def take() -> None:
        listening.accept()[0].close()

    taken = threading.Timer(0.1, take)
    taken.start()
    connection = socket_directory.connect(path, time.monotonic() + 60)
    assert connection is not None, "there is room after all"
    for one in (*waiting, connection, listening):
        one.close()
    taken.join()


def test_an_old_unfinished_socket_is_removed(directory: Path, answers: TraceServer) -> None:
    left, begins = (directory / f"engine-{name}.new" for name in ("left", "begins"))
    for path in (left, begins):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(str(path))
    os.utime(left, (time.time() - 100,) * 2)
    assert len(ask_engines(Question()).engines) == 1
    assert not left.exists()
    assert begins.exists(), "somebody may be about to listen there"


def test_a_malformed_trace_is_refused() -> None:
    for line in (
        b"x",
        b"{}",
        b'{"request_id":"a","events":[["Nothing",{}]],"left_out":0,"stored":[],"heartbeats":0}',
        b'{"request_id":"\xff","events":[],"left_out":0,"stored":[],"heartbeats":0}',
        b'{"request_id":"a","events":[["Arrived",{"id":' + b"[" * 100_000,
    ):
        with pytest.raises(ProtocolError):
            decode_trace(line)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["explain", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_lists_and_explains_requests_within_80_columns(
    answers: TraceServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = command(capsys).splitlines()
    assert listed[0] == "cmpl-a-0-12345678"
    assert re.sub(r"10\d s", "100 s", listed[1]) == (
        "  100 s ago, decode engine, 20 tokens: 19 computed, 1 from its own prefix cache;"
    )
    assert listed[2] == "  1 load failed"
    said = command(capsys, "a")
    assert "+0.0 ms  The request has 20 tokens. Possible sources: peer." in said
    assert all(len(line) <= 80 for line in said.splitlines())
    (plain,) = json.loads(command(capsys, "a", "--json"))
    assert plain["request_id"] == "cmpl-a-0-12345678"
    assert plain["events"][0] == ["Arrived", {**plain["events"][0][1], "tokens": 20}]
    assert plain["engine"]["role"] == "decode"


def test_control_characters_of_a_request_id_are_replaced(
    traces: TraceBuffer, answers: TraceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for event in everything("cmpl-\x1b[31mred-0-12345678", time.monotonic()):
        traces(event)
    assert "cmpl-?[31mred-0-12345678" in command(capsys)
    assert "\x1b" not in command(capsys, "\x1b[31mred")


def test_a_request_is_one_line_without_a_terminal(
    answers: TraceServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line, *_ = command(capsys).splitlines()
    assert re.fullmatch(r"cmpl-a-0-12345678  10\d s ago, decode engine, 20 tokens: .*; 1 load failed", line)


def test_a_long_request_id_is_wrapped_and_complete(
    traces: TraceBuffer,
    answers: TraceServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "cmpl-" + "a-long-name-" * 20 + "0-12345678"
    for event in everything(name, time.monotonic()):
        traces(event)
    for said in (command(capsys), command(capsys, name)):
        assert max(map(len, said.splitlines())) <= 80
        assert name in said.replace("\n  ", "")


def test_control_characters_of_a_refusal_are_replaced(directory: Path) -> None:
    directory.mkdir(0o700)
    with engine_that_says(directory, b'{"error": "no \\u001b[31m"}\n'):
        err = run_kvferry("explain").stderr
    assert "no ?[31m" in err
    assert "\x1b" not in err


def test_errors_distinguish_missing_engines_from_missing_requests(directory: Path) -> None:
    def said(*arguments: str) -> str:
        return run_kvferry("explain", *arguments).stderr

    assert said().startswith("kvferry: no engine of this user runs on this machine; ")
    serving = TraceServer(remembered(), engine(), 100)
    try:
        assert said() == "kvferry: no request has arrived yet\n"
        assert said("a").startswith(
            "kvferry: no request 'a' is remembered by 1 engine (of their last requests: 0)"
        )
        assert said("x" * 600).startswith("kvferry: a request id has 1 to 511 bytes")
    finally:
        serving.close()
