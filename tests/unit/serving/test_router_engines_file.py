"""Engines that come and go while the router runs."""

from __future__ import annotations

import logging

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Engines
from kvferry.tools.serving.router.fleet import read_engines
from support.waiting import wait_for


def test_a_file_has_a_role_and_a_url_on_each_line(tmp_path):
    file = tmp_path / "engines"
    file.write_text(
        "# ours\n\nprefill http://a:1/\n  decode   http://b:1\ndecode b:1\ndecode https://c\nboth d:1\n"
    )
    expected = {"prefill": ("http://a:1", "http://d:1"), "decode": ("http://b:1", "https://c", "http://d:1")}
    assert read_engines(file) == expected


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
    engines = Engines([], ["http://a:1", "http://b:1"])
    pool = engines.decode
    first, second = pool.backends
    with first.count_request():
        engines.replace([], ["http://b:1", "http://c:1"])
        assert pool.backends[0] is second
        assert engines.known == (*pool.backends, first)
        engines.replace([], ["http://a:1"])
        assert engines.known == pool.backends == (first,)
        assert not first.draining
        engines.replace([], ["http://b:1"])
        assert pool.backends[0] is not second, "it was removed without requests, and is forgotten"
        assert engines.known == (*pool.backends, first)
    assert engines.known == pool.backends


def test_an_engine_whose_role_changes_stays_the_same(caplog):
    caplog.set_level(logging.WARNING, "kvferry.router")
    engines = Engines(["http://a:1"], ["http://b:1", "http://c:1"])
    first, second, third = engines.known
    second.mark_up()
    with second.count_request():
        engines.replace(["http://a:1", "http://b:1"], ["http://c:1"])
        assert (engines.prefill.backends, engines.decode.backends) == ((first, second), (third,))
        assert (second.role, second.up, second.outstanding, second.draining) == (Role.PREFILL, True, 1, False)
        engines.replace(["http://b:1"], ["http://a:1", "http://b:1"])
        assert (engines.prefill.backends, engines.decode.backends) == ((second,), (first, second))
        assert [str(one) for one in (first, second)] == ["decode engine http://a:1", "engine http://b:1"]
    assert engines.known == (second, first), "each once"
    assert caplog.messages == [
        "engine http://b:1 changes its role from decode to prefill",
        "engine http://b:1 changes its role from prefill to both",
        "engine http://a:1 changes its role from prefill to decode",
        "decode engine http://c:1 is removed",
    ]


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


@pytest.mark.slow
def test_requests_under_way_end_at_an_engine_whose_role_changes_and_new_ones_follow_the_role(
    stage, fake, kv, tmp_path
):
    file = tmp_path / "engines"
    one, other = (fake(hands_over=kv) for _ in range(2))
    scene = stage([one], [other], engines_file=file)
    health = lambda: scene.client.get("/health").json()  # noqa: E731

    def write(*lines: str) -> None:
        (tmp_path / "next").write_text("\n".join(lines))
        (tmp_path / "next").rename(file)

    def roles() -> tuple[list[str], ...]:
        found = health()
        return tuple(
            [engine["url"] for engine in found[task] if engine["up"]] for task in ("prefill", "decode")
        )

    other.event_seconds = 60
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        next(events := answer.iter_raw())
        asked = [body.get("kv_transfer_params") for body in other.bodies]
        write(f"prefill {other.url}", f"decode {one.url}")
        wait_for(lambda: roles() == ([other.url], [one.url]))
        assert scene.complete().status_code == 200
        assert asked == [kv]
        assert other.bodies[-1]["kv_transfer_params"]["do_remote_decode"]
        assert one.bodies[-1]["kv_transfer_params"] == kv
        other.event_seconds = 0.0
        assert b"".join(events).endswith(b"data: [DONE]\n\n")
    write(f"both {other.url}", f"decode {one.url}")
    wait_for(lambda: roles() == ([other.url], [other.url, one.url]))
    assert health()["draining"] == []
    before = [len(engine.raw) for engine in (one, other)]
    for _ in range(4):
        assert scene.complete().status_code == 200
    # Two requests went to each. The engine that does both computed the prompts of all.
    assert [len(engine.raw) - count for engine, count in zip((one, other), before, strict=True)] == [2, 4]
    assert ["kv_transfer_params" in body for body in one.bodies[-2:]] == [True, True]
    assert sorted("kv_transfer_params" in body for body in other.bodies[-4:]) == [False, False, True, True]
    assert 'requests_total{outcome="decode",reason="both"} 2.0' in scene.client.get("/metrics").text


@pytest.mark.slow
def test_an_engine_gets_no_offer_of_its_own(stage, fake, kv):
    both, busy = fake(hands_over=kv), fake(status=503)
    scene = stage([both], [busy, both])
    assert scene.complete().status_code == 200
    assert busy.bodies[0]["kv_transfer_params"] == kv
    prefill, decode = both.bodies
    assert prefill["kv_transfer_params"]["do_remote_decode"]
    assert "kv_transfer_params" not in decode
