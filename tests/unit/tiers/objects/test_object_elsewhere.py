"""Servers that name another one, names that no client can read, and ways that others can listen on."""

from __future__ import annotations

from xml.sax.saxutils import escape

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.format.chunk import Chunk
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.faults import Fault, Unavailable
from kvferry.tiers.paths import chunk_name
from support.chunk_files import image, key
from support.object_server import error, ill, response
from support.objects import get, known, open_objects, put, warnings
from support.stores import FILE_BYTES, GROUP, NAMESPACE

pytestmark = pytest.mark.slow

URL = "s3://bucket/path"
FOLDER = f"path/{NAMESPACE.digest.hex()}"
CODES = (
    "301 Moved Permanently",
    "302 Found",
    "303 See Other",
    "307 Temporary Redirect",
    "308 Permanent Redirect",
)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def redirect(code: str, to: str) -> bytes:
    return response(code).replace(b"ETag", f"Location: {to}\r\nETag".encode(), 1)


def listing(*names: str) -> bytes:
    rows = "".join(
        f"<Contents><Key>{name}</Key><Size>{FILE_BYTES}</Size>"
        '<ETag>"1"</ETag><LastModified>2025-11-01T00:00:00.000Z</LastModified></Contents>'
        for name in names
    )
    return response(
        "200 OK", f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
    )


@pytest.mark.parametrize("code", CODES)
def test_no_request_follows_to_another_server(code, caplog):
    heard = []
    elsewhere_has = response("200 OK", image(Chunk(NAMESPACE.digest, key(1), (GROUP,))))

    def elsewhere(head: bytes) -> bytes:
        heard.append(head)
        return elsewhere_has

    with ill(elsewhere, hangs_up=True) as other:
        to = f"http://localhost:{other.port}/{URL[5:]}"
        with ill(redirect(code, to), hangs_up=True) as server:
            options = {**server.options, "session_token": "hidden"}
            store = open_objects(URL, options=options, timeout_seconds=2.0)
            assert get(store, 1) is GetOutcome.IO_ERROR
            assert put(store, 1) is PutOutcome.IO_ERROR
            bucket = BucketClient(URL, options, 2.0)
            for ask in (
                lambda: bucket.head("a"),
                lambda: bucket.put("a", [b"chunk"]),
                lambda: bucket.move("a", "b"),
                lambda: bucket.remove(["a"]),
            ):
                with pytest.raises(Unavailable, match="it redirects requests"):
                    ask()
    assert not heard, "another server was asked, with the session token"
    assert store.faults == {Fault.REDIRECTED: 3}
    assert any("it redirects requests" in said for said in warnings(caplog))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"endpoint": "http://127.0.0.1:9000", "allow_http": "true", "secret_access_key": "s"}, "127.0.0.1"),
        ({"endpoint": "https://minio:9000", "secret_access_key": "s"}, "minio"),
        ({"endpoint": "https://minio:9000", "skip_signature": "true"}, "minio"),
        ({"endpoint": "https://minio:9000", "skip_signature": "false"}, None),
        ({"endpoint": "https://minio:9000"}, None),
        ({"secret_access_key": "s"}, None),
        ({"endpoint": "https://minio:9000", "secret_access_key": "s", "proxy_url": "http://p:1"}, None),
    ],
)
def test_requests_are_kept_to_one_server_where_no_other_is_needed(options, kept, monkeypatch):
    with_key = {"access_key_id": "k"} if "secret_access_key" in options else {}
    options = {"region": "us-east-1", **with_key, **options}
    assert BucketClient(URL, options, 2.0).store.client_options.get("proxy_excludes") == kept
    for name in [name for name in options if name != "proxy_url"]:
        monkeypatch.setenv(f"AWS_{name.upper()}", options.pop(name))
    assert BucketClient(URL, options, 2.0).store.client_options.get("proxy_excludes") == kept
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    assert BucketClient(URL, options, 2.0).store.client_options.get("proxy_excludes") is None


@pytest.mark.parametrize(
    "odd",
    ["../{0}/x", "./x", "/x", "6b//x", "6b/a\x7fb", "6b/&#27;[31m", "{0}/../../x"],
)
def test_a_name_that_cannot_be_read_hides_its_own_folder_at_most(odd, caplog):
    odd = f"{FOLDER}/{odd.format(NAMESPACE.digest.hex())}"
    names = [f"path/{chunk_name(NAMESPACE.digest, key(number))}" for number in (1, 2, 3)]

    def answer(head: bytes) -> bytes:
        if b"list-type" not in head:
            return error("404 Not Found", "NoSuchKey")
        prefix = head.split(b"prefix=")[1].split(b" ")[0].split(b"&")[0].decode().replace("%2F", "/")
        return listing(*(name for name in [*names, odd] if name.startswith(prefix)))

    with ill(answer, hangs_up=True) as server:
        store = open_objects(URL, server, timeout_seconds=20.0)
        store.refresh()
        spoilt = [name for name in names if odd.startswith(name.rpartition("/")[0])]
        assert known(store, 1, 2, 3) == [name not in spoilt for name in names]
        assert len(spoilt) < 2
    said = [said for said in warnings(caplog) if "a name that cannot be read" in said]
    assert len(said) == 1
    assert said[0].isprintable()
    assert "remove it" in said[0]
    assert not store.faults or Fault.ODD_NAME not in store.faults


@pytest.mark.parametrize(
    "name",
    ["a%2fb", "%2e%2e/x", "\u00e9\u4e2d\U0001f600", "a\\b", "~", "x" * 900, "6b", "6b/", "q.kv", "6b/6B.kv"],
)
def test_odd_names_that_can_be_read_are_passed_over(name, caplog):
    good = f"path/{chunk_name(NAMESPACE.digest, key(1))}"
    answers = listing(escape(f"{FOLDER}/{name}"), f"elsewhere/{good}", good, escape(name))
    with ill(lambda head: answers if b"list-type" in head else error("404 Not Found", "NoSuchKey")) as server:
        store = open_objects(URL, server, timeout_seconds=2.0)
        assert len(store) == 1
        assert known(store, 1) == [True]
    assert not [said for said in warnings(caplog) if "cannot" in said]


def test_chunks_of_others_under_the_same_prefix_are_never_taken(s3_server, s3_url):
    mine = open_objects(s3_url, s3_server)
    inside, beside = (open_objects(f"{s3_url}{more}", s3_server) for more in ("/inside", "-beside"))
    for other, number in ((inside, 1), (beside, 2)):
        assert put(other, number) is PutOutcome.STORED
    mine.refresh()
    assert known(mine, 1, 2) == [False, False]
    assert [get(mine, 1), get(mine, 2)] == [GetOutcome.ABSENT, GetOutcome.ABSENT]
    assert put(mine, 1) is PutOutcome.STORED
    assert [get(inside, 1), get(beside, 2)] == [GetOutcome.HIT, GetOutcome.HIT]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://minio:9", True),
        ("http://user:hidden@10.0.0.1:9", True),
        ("http://127.0.0.1:9", False),
        ("https://minio:9", False),
    ],
)
def test_a_way_that_others_can_listen_on_is_allowed_in_words_and_warned_of(endpoint, said, caplog):
    keys = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    open_objects(URL, options={**keys, "endpoint": endpoint, "allow_http": "true"}, timeout_seconds=0.2)
    warned = [one for one in warnings(caplog) if "without encryption: who listens" in one]
    assert bool(warned) is said
    assert "hidden" not in caplog.text


@pytest.mark.parametrize("more", [{}, {"allow_http": "false"}])
def test_a_way_without_encryption_has_to_be_allowed(more, monkeypatch):
    with pytest.raises(ConfigError, match="traffic to http://minio:9000 is not encrypted; use https"):
        BucketClient(URL, {"endpoint": "http://minio:9000", **more}, 2.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://hidden:hidden@minio:9000")
    with pytest.raises(ConfigError, match="traffic to http://minio:9000 is not encrypted; use https"):
        BucketClient(URL, more, 2.0)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    if not more:
        BucketClient(URL, {}, 2.0)
