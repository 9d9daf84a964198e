"""Requests of one session and the engines that serve them."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.tools.serving.router.backends import Engines, session_of
from support.clock import Clock
from support.waiting import wait_for

NAMES = [f"session-{number}" for number in range(200)]


def chosen(urls: list[str], names: list[str] = NAMES) -> dict[str, str]:
    """URL of the engine of each session."""
    pool = Engines([], urls).decode
    for backend in pool.backends:
        backend.mark_up()
    return {name: pool.next([], session_of((), {"user": name})).url for name in names}


def test_sessions_spread_over_the_engines_in_any_order_of_urls():
    urls = ["http://a:1", "http://b:1", "http://c:1", "http://d:1"]
    found = chosen(urls)
    assert found == chosen(urls[::-1])
    assert all(30 <= count <= 70 for count in Counter(found.values()).values())


def test_an_engine_that_is_added_takes_only_its_own_share():
    urls = ["http://a:1", "http://b:1", "http://c:1"]
    before, after = chosen(urls), chosen([*urls, "http://d:1"])
    moved = [name for name in NAMES if before[name] != after[name]]
    assert {after[name] for name in moved} == {"http://d:1"}
    assert 30 <= len(moved) <= 70


@pytest.mark.parametrize(
    ("headers", "body", "same_as"),
    [
        (((b"x-session-id", b"a"),), {"prompt_cache_key": "b", "user": "c"}, "a"),
        ((), {"prompt_cache_key": "b", "user": "c"}, "b"),
        (((b"x-session-id", b""),), {"prompt_cache_key": "", "user": "c"}, "c"),
        ((), {"prompt_cache_key": 7, "user": ["c"]}, None),
        ((), {}, None),
    ],
)
def test_the_name_is_the_header_or_else_a_field(headers, body, same_as):
    assert session_of(headers, body) == (same_as and session_of((), {"user": same_as}))


def test_a_name_with_half_a_surrogate_pair_is_a_name():
    assert session_of((), {"user": "\ud800"}) is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_session_stays_at_its_engines(stage, fake, kv, path):
    scene = stage([fake(hands_over=kv) for _ in range(3)], [fake() for _ in range(3)])
    for _ in range(6):
        scene.client.post(path, json={"prompt": "x", "max_tokens": 5}, headers={"X-Session-Id": "one"})
    for engines in (scene.prefill, scene.decode):
        assert sorted(len(engine.raw) for engine in engines) == [0, 0, 6]


@pytest.mark.slow
def test_a_session_goes_to_the_next_engine_while_its_own_is_down_or_rests(stage, fake, kv):
    clock = Clock()
    scene = stage([fake(hands_over=kv)], [fake() for _ in range(3)], clock=clock)

    def asked() -> int:
        before = [len(engine.raw) for engine in scene.decode]
        assert scene.complete(user="one").status_code == 200
        return next(at for at in (2, 1, 0) if len(scene.decode[at].raw) > before[at] and accepts(at))

    def accepts(at: int) -> bool:
        return scene.decode[at].status == 200

    def is_up(at: int) -> bool:
        return scene.client.get("/health").json()["decode"][at]["up"]

    own = asked()
    scene.decode[own].status = 429
    following = asked()
    assert following != own
    seen = len(scene.decode[own].raw)
    assert [asked(), asked()] == [following, following]
    assert len(scene.decode[own].raw) == seen, "it rests"
    scene.decode[own].status = 200
    clock.now += 60
    assert asked() == own
    scene.decode[own].healthy = False
    wait_for(lambda: not is_up(own))
    assert [asked(), asked()] == [following, following]
    scene.decode[own].healthy = True
    wait_for(lambda: is_up(own))
    assert asked() == own
