"""Answers of object storage that are wrong, cut off, of two objects, endless, or another server's."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from benchmarks.object_server import BUCKET
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.faults import Fault
from support.chunk_files import content, image, key
from support.object_server import Server, error, ill, response
from support.objects import get, known, open_objects, put, warnings
from support.stores import FILE_BYTES, GROUP, NAMESPACE

URL = "s3://bucket/path"
CHUNK = Chunk(NAMESPACE.digest, key(1), (GROUP,))
IMAGE = image(CHUNK)
OTHER = image(CHUNK, [bytes(len(part)) for part in content(CHUNK)])
"""A chunk of the same key and other content, whose checksums are right."""
HTML = b"<!doctype html><html><body>Please log in to the network</body></html>"
EMPTY = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"


def of_objects(answer: bytes) -> object:
    """A server whose bucket is empty, and which answers so when it is asked for an object."""
    return lambda head: response("200 OK", EMPTY) if b"list-type" in head else answer


@pytest.mark.parametrize(
    ("sent", "promised"),
    [
        pytest.param(IMAGE[:20_000], FILE_BYTES, id="cut off"),
        pytest.param(IMAGE[:4096], FILE_BYTES, id="cut off after the header"),
        pytest.param(IMAGE[:20_000], 20_000, id="shorter"),
        pytest.param(IMAGE[:100], 100, id="part of a header"),
        pytest.param(b"", 0, id="empty"),
        pytest.param(IMAGE + bytes(4096), FILE_BYTES + 4096, id="longer"),
        pytest.param(HTML, len(HTML), id="a page"),
        pytest.param(HTML.ljust(FILE_BYTES), FILE_BYTES, id="a page of the length"),
        pytest.param(IMAGE, FILE_BYTES, id="whole"),
    ],
)
def test_a_body_that_is_cut_off_or_another_one_is_a_miss(sent, promised):
    with ill(of_objects(response("200 OK", sent, length=promised)), hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        done = get(store, 1)
        assert (done is GetOutcome.HIT) is (sent == IMAGE)
        assert done in (GetOutcome.HIT, GetOutcome.CORRUPT, GetOutcome.IO_ERROR)
        assert known(store, 1) == [False]
        assert store.stats.gets == {done: 1}


@pytest.mark.parametrize(
    "again",
    [OTHER, IMAGE[: FILE_BYTES // 2] + OTHER[FILE_BYTES // 2 :], IMAGE],
    ids=["another", "half of each", "the same"],
)
@pytest.mark.parametrize("tag", ['"1"', '"2"'])
@pytest.mark.parametrize("ranges", [True, False])
def test_an_object_that_is_replaced_while_it_is_read_is_whole_or_a_miss(again, tag, ranges):
    asked = []

    def answer(head: bytes) -> bytes:
        if b"list-type" in head:
            return response("200 OK", EMPTY)
        asked.append(head)
        if len(asked) == 1:
            return response("200 OK", IMAGE[: FILE_BYTES // 2], length=FILE_BYTES)
        begin = re.search(rb"range: bytes=(\d+)-", head.lower())
        if not (ranges and begin):
            return response("200 OK", again).replace(b'"1"', tag.encode())
        part = again[int(begin[1]) :]
        head = response("206 Partial Content", part).replace(b'"1"', tag.encode())
        span = f"Content-Range: bytes {int(begin[1])}-{FILE_BYTES - 1}/{FILE_BYTES}\r\n"
        return head.replace(b"ETag", span.encode() + b"ETag", 1)

    with ill(answer, hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        into = whole_pages(CHUNK.body_bytes)
        done = store.get(key(1), GROUP, into)
        if done is GetOutcome.HIT:
            assert into in (IMAGE[-len(into) :], OTHER[-len(into) :]), "half of each"
        assert done in (GetOutcome.IO_ERROR, GetOutcome.CORRUPT, GetOutcome.HIT)
        assert store.stats.gets == {done: 1}


def test_a_page_in_place_of_every_answer_is_never_a_chunk(caplog):
    with ill(response("200 OK", HTML), hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert put(store, 1) in (PutOutcome.IO_ERROR, PutOutcome.STORED)
        assert get(store, 1) is GetOutcome.CORRUPT
        assert put(store, 2) in (PutOutcome.IO_ERROR, PutOutcome.STORED)
        store.refresh()
        assert known(store, 1) == [False]
    assert store.faults
    assert any("see whether endpoint, region and URL" in one for one in warnings(caplog))


def test_a_clock_that_is_wrong_is_told(caplog):
    with ill(error("403 Forbidden", "RequestTimeTooSkewed")) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert get(store, 1) is GetOutcome.IO_ERROR
    assert store.faults == {Fault.SKEWED: 2}
    [said] = warnings(caplog)
    assert said.endswith("(403 RequestTimeTooSkewed); set the clock of this machine")


def test_connections_that_are_reset_are_counted():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reset() -> None:
            with suppress(OSError):
                while True:
                    one, _ = listening.accept()
                    one.recv(1000)
                    one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n123")
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.close()

        threading.Thread(target=reset, daemon=True).start()
        store = open_objects(URL, Server(listening.getsockname()[1]), timeout_seconds=2.0)
        assert get(store, 1) is GetOutcome.IO_ERROR
        assert put(store, 1) is PutOutcome.IO_ERROR
        listening.shutdown(socket.SHUT_RDWR)
    assert sum(store.faults.values()) == 3
    assert store.faults[Fault.UNREACHABLE] >= 2


def test_an_answer_that_trickles_costs_no_more_than_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle(one: socket.socket) -> None:
            with suppress(OSError):
                one.recv(1000)
                one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 61440\r\n\r\n")
                for at in range(len(IMAGE)):
                    one.sendall(IMAGE[at : at + 1])
                    time.sleep(0.05)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=trickle, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        store = open_objects(URL, Server(listening.getsockname()[1]), timeout_seconds=1.0)
        assert get(store, 1) is GetOutcome.IO_ERROR
        assert store.faults[Fault.TIMEOUT] >= 1
        listening.shutdown(socket.SHUT_RDWR)


def test_a_listing_without_end_costs_its_time_and_no_more_memory_than_is_bounded():
    pages = iter(range(1 << 30))

    def answer(head: bytes) -> bytes:
        if b"list-type" not in head:
            return error("404 Not Found", "NoSuchKey")
        page = next(pages)
        names = (key(1000 * page + n).hex() for n in range(1000))
        rows = "".join(
            f"<Contents><Key>path/{NAMESPACE.digest.hex()}/{name[:2]}/{name}.kv</Key><Size>61440</Size>"
            '<ETag>"1"</ETag><LastModified>2025-11-01T00:00:00.000Z</LastModified></Contents>'
            for name in names
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{page}</NextContinuationToken>"
        return response("200 OK", f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode())

    with ill(answer, hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=2.0, max_keys=5000)
        assert next(pages) > 6, "it was not endless"
        assert 0 < len(store) <= 5000
        assert get(store, 1) is GetOutcome.ABSENT


def test_a_bucket_that_is_deleted_while_it_serves_is_a_miss(s3_server, s3_url, tmp_path):
    store = open_objects(s3_url, s3_server)
    assert put(store, 1) is PutOutcome.STORED
    bucket = s3_server.root / BUCKET
    bucket.rename(tmp_path / "away")
    try:
        assert get(store, 1) in (GetOutcome.ABSENT, GetOutcome.IO_ERROR)
        assert put(store, 2) in (PutOutcome.IO_ERROR, PutOutcome.STORED)
        store.refresh()
        assert get(store, 1) in (GetOutcome.ABSENT, GetOutcome.IO_ERROR)
    finally:
        shutil.rmtree(bucket, ignore_errors=True)
        (tmp_path / "away").rename(bucket)
    late = open_objects(s3_url, s3_server)
    assert get(late, 1) is GetOutcome.HIT
    assert put(late, 2) in (PutOutcome.STORED, PutOutcome.PRESENT)
