"""What becomes of chunks when their store stalls, refuses or is not there."""

from __future__ import annotations

import os
import signal
import threading
from pickle import PickleBuffer

import pytest
from obstore.exceptions import GenericError

from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects import client
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault, Unavailable
from support.chunk_files import key
from support.clock import Clock
from support.object_server import Line, Server, error, ill, response
from support.objects import get, known, open_objects, put, warnings
from support.stores import FILE_BYTES, GROUP, body

pytestmark = pytest.mark.slow

CLOSED = Server(1)
URL = "s3://bucket/path"
HALF = response("200 OK", b"x" * 1000, length=FILE_BYTES)


@pytest.mark.parametrize("answer", [b"", HALF[:-1000], HALF], ids=["nothing", "a head", "half an answer"])
def test_stalled_request_is_given_up_with_a_timeout(answer, caplog):
    with ill(answer) as server:
        store = open_objects(URL, server, timeout_seconds=0.6)
        assert get(store, 1) is GetOutcome.IO_ERROR
        assert store.faults == {Fault.TIMEOUT: 2}
    [said] = warnings(caplog)
    assert said == (
        "object tier s3://bucket/path: no answer in time; "
        "see whether it and the network are healthy, or raise the timeout"
    )


def test_a_store_that_stalls_lets_go_of_the_memory_when_it_is_given_up():
    group = ChunkGroup("full", 256, (ChunkSection("kv", 8, 1 << 20),))
    memory = bytearray(body(1, group))
    with ill(b"") as server:
        store = open_objects(URL, server, timeout_seconds=0.6)
        assert store.put(key(1), group, memoryview(memory)) is PutOutcome.IO_ERROR
        memory.clear()


def test_a_refusal_before_all_was_sent_lets_go_of_the_memory():
    group = ChunkGroup("full", 256, (ChunkSection("kv", 8, 8 << 20),))
    memory = bytearray(body(1, group))
    with ill(error("403 Forbidden", "AccessDenied"), reads_body=False) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert store.put(key(1), group, memoryview(memory)) is PutOutcome.IO_ERROR
        memory.clear()


@pytest.mark.parametrize(
    ("answer", "fault", "said"),
    [
        (error("403 Forbidden", "AccessDenied"), Fault.DENIED, "denied (403 AccessDenied); give credentials"),
        (error("401 Unauthorized", "X"), Fault.DENIED, "denied (401 X); give credentials"),
        (
            error("404 Not Found", "NoSuchBucket"),
            Fault.NO_BUCKET,
            "no such bucket (404 NoSuchBucket); make it",
        ),
        (error("503 Slow Down", "SlowDown"), Fault.THROTTLED, "fewer requests (503 SlowDown); see"),
        (error("429 Too Many Requests", "X"), Fault.THROTTLED, "fewer requests (429 X); see"),
        (error("500 Oops", "InternalError"), Fault.SERVER, "error of its own (500 InternalError); see"),
        (
            response("301 Moved"),
            Fault.REDIRECTED,
            "redirects requests (without saying where); give the server",
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Fault.UNEXPECTED, "error sending request); see whether endpoint"),
    ],
)
def test_a_server_that_refuses_is_counted_and_said_once(answer, fault, said, caplog):
    with ill(answer) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert get(store, 1) is GetOutcome.IO_ERROR
        assert put(store, 1) is PutOutcome.IO_ERROR
        assert known(store, 1) == [False]
    assert store.faults == {fault: 3}
    assert (store.stats.misses, store.stats.dropped) == ({GetOutcome.IO_ERROR: 1}, {PutOutcome.IO_ERROR: 1})
    [warned] = warnings(caplog)
    assert warned.startswith("object tier s3://bucket/path: ")
    assert said in warned
    assert len(warned) < 300


@pytest.mark.parametrize("head", ["200 OK", "200 OK\r\nTransfer-Encoding: chunked"])
def test_an_answer_that_is_no_object_is_a_miss(head):
    with ill(b"HTTP/1.1 " + head.encode() + b"\r\n\r\n0\r\n\r\n") as server:
        store = open_objects(URL, server, timeout_seconds=0.6)
        assert get(store, 1) is GetOutcome.IO_ERROR


def test_a_connection_that_breaks_off(caplog):
    with ill(b"", hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert get(store, 1) is GetOutcome.IO_ERROR
    assert store.faults == {Fault.UNREACHABLE: 2}
    assert "it cannot be reached (the connection broke off)" in caplog.text


def test_a_port_where_nobody_listens(caplog):
    store = open_objects(URL, CLOSED, timeout_seconds=2.0)
    assert get(store, 1) is GetOutcome.IO_ERROR
    assert put(store, 1) is PutOutcome.IO_ERROR
    assert store.faults == {Fault.UNREACHABLE: 3}
    [said] = warnings(caplog)
    assert said == (
        "object tier s3://bucket/path: it cannot be reached (Connection refused); "
        "see to its endpoint, the network and allow_http"
    )


def test_a_host_that_does_not_exist(caplog):
    options = {**CLOSED.options, "endpoint": "http://no.such.host.invalid"}
    open_objects(URL, options=options)
    assert "it cannot be reached (its name is not known)" in caplog.text


def test_the_real_server_refuses_wrong_credentials_and_missing_buckets(s3_server, caplog):
    denied = open_objects(URL, options={**s3_server.options, "secret_access_key": "hidden-and-wrong"})
    missing = open_objects("s3://missing/path", s3_server)
    for one in (denied, missing):
        assert get(one, 1) is GetOutcome.IO_ERROR
        assert put(one, 1) is PutOutcome.IO_ERROR
    assert denied.faults == {Fault.DENIED: 3}
    assert missing.faults == {Fault.NO_BUCKET: 3}
    assert "access is denied (403 SignatureDoesNotMatch)" in caplog.text
    assert "hidden" not in caplog.text


def test_a_store_that_is_away_at_the_start_is_found_by_a_refresh(s3_server, s3_url, caplog):
    put(open_objects(s3_url, s3_server), 1)
    with Line(s3_server) as line:
        line.whole.clear()
        store = open_objects(s3_url, line.server, timeout_seconds=2.0)
        assert known(store, 1) == [False]
        assert store.refresh() == 0
        assert len(warnings(caplog)) == 1
        line.whole.set()
        assert store.refresh() == 1
        assert known(store, 1) == [True]
        assert get(store, 1) is GetOutcome.HIT


def test_a_store_that_fails_is_left_alone_and_asked_again_later(s3_server, s3_url):
    clock = Clock()
    with Line(s3_server) as line:
        store = open_objects(s3_url, line.server, timeout_seconds=2.0, pause_seconds=30.0, clock=clock)
        for number in range(6):
            assert put(store, number) is PutOutcome.STORED
        line.whole.clear()
        for number in range(3):
            assert known(store, number, 5) == [True, True]
            assert get(store, number) is GetOutcome.IO_ERROR
        assert known(store, 3, 4, 5) == [False] * 3
        assert get(store, 3) is GetOutcome.IO_ERROR
        assert store.refresh() == 0
        assert store.faults == {Fault.TIMEOUT: 3, Fault.PAUSED: 2}, "what rests is not asked"
        clock.now = 30.0
        assert known(store, 3, 4, 5) == [True] * 3
        assert get(store, 4) is GetOutcome.IO_ERROR
        assert get(store, 5) is GetOutcome.IO_ERROR
        assert store.faults == {Fault.TIMEOUT: 4, Fault.PAUSED: 3}
        line.whole.set()
        clock.now = 60.0
        assert get(store, 5) is GetOutcome.HIT
        assert get(store, 1) is GetOutcome.HIT
        assert known(store, 0, 3) == [False, True]
        assert store.refresh() == 1
        assert known(store, *range(6)) == [True] * 6


def test_a_store_that_only_refuses_writes_is_still_read():
    def answer(head: bytes) -> bytes:
        if head.startswith(b"PUT"):
            return error("403 Forbidden", "AccessDenied")
        return (
            error("404 Not Found", "NoSuchKey") if b"list-type" not in head else response("200 OK", LISTING)
        )

    with ill(answer) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        for _ in range(4):
            assert put(store, 1) is PutOutcome.IO_ERROR
        # One more than chunks: the note.
        assert store.faults == {Fault.DENIED: 3, Fault.PAUSED: 2}
        for _ in range(4):
            assert get(store, 1) is GetOutcome.ABSENT
        assert store.refresh() == 0
        assert store.faults == {Fault.DENIED: 3, Fault.PAUSED: 2}


LISTING = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"


def test_a_store_that_minds_removing_what_is_gone_removes_the_rest():
    removed = set()

    def answer(head: bytes) -> bytes:
        path = head.split()[1].rpartition(b"%2F")[2]
        removed.add(path)
        return error("404 Not Found", "NoSuchKey") if path == b"gone" else response("204 No Content")

    with ill(answer) as server:
        options = {"base_url": server.options["endpoint"], "bearer_token": "tests", "allow_http": "true"}
        bucket = BucketClient("gs://bucket/path", options, 2.0)
        bucket.remove(["gone", *(f"chunk{number}" for number in range(40))])
    assert removed == {b"gone", *(b"chunk%d" % number for number in range(40))}


def test_memory_is_held_until_the_client_has_let_go_of_it(s3_server, s3_url, monkeypatch):
    def slowly(_store, _path, pieces, **_):
        held = [PickleBuffer(piece) for piece in pieces]
        threading.Timer(0.2, held.clear).start()
        raise GenericError("given up")

    store = open_objects(s3_url, s3_server)
    memory = bytearray(body(1))
    monkeypatch.setattr("obstore.put", slowly)
    assert store.put(key(1), GROUP, memoryview(memory)) is PutOutcome.IO_ERROR
    memory.clear()


def test_a_process_that_was_forked_is_told_instead_of_waiting_forever(s3_server, s3_url):
    store = open_objects(s3_url, s3_server)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        told = get(store, 1) is GetOutcome.IO_ERROR and store.faults == {Fault.FORKED: 1}
        told = told and open_objects(s3_url, s3_server).faults == {Fault.FORKED: 1}
        os._exit(0 if told else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_client_that_was_made_and_not_used_before_a_fork_is_not_used_after_it(s3_server, s3_url):
    client._first_user.cache_clear()
    bucket = BucketClient(s3_url, s3_server.options, 8.0)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        fault = None
        try:
            bucket.head("a")
        except Unavailable as error:
            fault = error.fault
        os._exit(0 if fault is Fault.FORKED else 1)
    assert os.waitpid(child, 0)[1] == 0
