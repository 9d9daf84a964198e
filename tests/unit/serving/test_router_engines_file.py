"""Engines that come and go while the router runs."""

from __future__ import annotations

import logging

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.router.backends import Pool
from kvferry.tools.serving.router.fleet import read_engines
from support.waiting import wait_for


def test_a_file_has_a_role_and_a_url_on_each_line(tmp_path):
    file = tmp_path / "engines"
    file.write_text(
        "# ours\n\nprefill http://a:1/\n  decode   http://b:1\ndecode http://b:1\ndecode https://c\n"
    )
    assert read_engines(file) == {"prefill": ("http://a:1",), "decode": ("http://b:1", "https://c")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode http://a:1\nprefil http://b:1", "line 2 of .* is 'prefil http://b:1'; write one engine per"),
        ("decode a", "line 1 "),
        ("decode http://a:1 http://b:1", "line 1 "),
        ("decode http://a:1", "has no prefill engine"),
        ("", "has no prefill engine"),
        ("decode http://a..b:1", "line 1 "),
        ("decode http://.:1", "line 1 "),
        (f"decode http://{'a' * 64}:1", "line 1 "),
        ("decode http://user:password@a:1", "line 1 "),
        ("decode http://a:1?b=c", "line 1 "),
        ("\udcff", "it is not text"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, text, message):
    file = tmp_path / "engines"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_engines(file)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read engines from .*: No such file"):
        read_engines(tmp_path / "engines")


def test_engines_that_stay_or_return_keep_their_state():
    pool = Pool("decode", ["http://a:1", "http://b:1"])
    first, second = pool.backends
    with pool.count_request(first):
        pool.replace(["http://b:1", "http://c:1"])
        assert pool.backends[0] is second
        assert pool.known == (*pool.backends, first)
        pool.replace(["http://a:1"])
        assert pool.known == pool.backends == (first,)
        assert not first.draining
        pool.replace(["http://b:1"])
        assert pool.backends[0] is not second, "it was removed without requests, and is forgotten"
        assert pool.known == (*pool.backends, first)
    assert pool.known == pool.backends


@pytest.mark.slow
def test_engines_are_added_and_removed_while_the_router_runs(stage, fake, kv, serve_app, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "kvferry.router")
    file = tmp_path / "engines"
    prefill, old, new = fake(hands_over=kv), fake(event_seconds=60), fake()
    scene = stage([prefill], [old], engines_file=file)
    health = lambda: scene.client.get("/health").json()  # noqa: E731
    with serve_app(new.app()) as url:

        def write(*decode: str) -> None:
            text = "".join(f"decode {one}\n" for one in decode) + f"prefill {prefill.url}\n"
            (tmp_path / "next").write_text(text)
            (tmp_path / "next").rename(file)

        def decode() -> list[str]:
            return [engine["url"] for engine in health()["decode"] if engine["up"]]

        with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            next(events := answer.iter_raw())
            write(old.url, url)
            wait_for(lambda: decode() == [old.url, url])
            assert scene.complete().status_code == 200
            assert len(new.raw) == 1, "the other one is busy"
            write(url)
            wait_for(lambda: decode() == [url])
            draining = {"role": "decode", "url": old.url, "requests": 1}
            assert health()["draining"] == [draining]
            state = f'engine_state{{role="decode",state="draining",url="{old.url}"}} 1.0'
            assert state in scene.client.get("/metrics").text
            assert [scene.complete().status_code for _ in range(2)] == [200, 200]
            assert (len(old.raw), len(new.raw), old.aborted) == (1, 3, 0)
            events.close()
        wait_for(lambda: health()["draining"] == [])
        file.write_text("decode nonsense\n")
        wait_for(lambda: "keeps its engines" in caplog.text)
        assert decode() == [url]
        assert scene.complete().status_code == 200
