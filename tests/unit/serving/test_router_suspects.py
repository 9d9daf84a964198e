"""A request during which engines die costs two of them, however often its client repeats it."""

from __future__ import annotations

import pytest

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.failures import REMEMBERED_SECONDS, Suspects
from support.clock import Clock

PATH = "/v1/completions"


def dead(engines) -> int:
    return sum(not engine.healthy for engine in engines)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_repeats_a_deadly_request_costs_two_engines(stage, fake, kv, role):
    mortal = [fake(dies_of="kill", hands_over=kv if role == "prefill" else None) for _ in range(4)]
    scene = stage(mortal, [fake()]) if role == "prefill" else stage([], mortal)
    for more in ({}, {}, {"user": "another"}, {"stream": True}):
        answer = scene.complete(prompt="kill", **more)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")
        assert answer.headers["x-should-retry"] == "false"
    assert "or an equal one, which is not tried again" in answer.json()["error"]["message"]
    assert dead(mortal) == 2
    assert scene.complete(prompt="harmless").status_code == 200


def test_a_stream_that_breaks_counts_as_a_death(stage, fake):
    scene = stage([], [fake(dies_after=1) for _ in range(4)])
    for _ in range(4):
        scene.complete(stream=True)
    assert sum(engine.asked for engine in scene.decode) == 2


def test_a_request_without_a_hand_over_is_remembered_too(stage, fake):
    scene = stage([], [fake(dies_of="kill") for _ in range(4)])
    for _ in range(4):
        scene.complete("/v1/embeddings", prompt="kill")
    assert dead(scene.decode) == 2


def test_a_deadly_request_is_tried_again_after_a_while(stage, fake):
    clock = Clock()
    scene = stage([], [fake(dies_of="kill") for _ in range(4)], clock=clock)
    scene.complete(prompt="kill")
    clock.now += REMEMBERED_SECONDS + 1
    scene.complete(prompt="kill")
    assert dead(scene.decode) == 4


def test_a_request_that_another_engine_has_answered_is_not_suspected(stage, fake):
    scene = stage([], [fake(dies_of="kill"), fake(), fake()])
    for deaths in (1, 2):
        assert scene.complete(prompt="kill").status_code == 200
        assert dead(scene.decode) == deaths
        for engine in scene.decode:
            engine.dies_of = "" if engine.asked else "kill"


def test_copies_of_a_request_at_one_engine_have_one_death_in_common():
    suspects, backend, body = Suspects(Clock()), Backend(Role.DECODE, "http://d"), {"prompt": "x"}
    backend.mark_up()
    copies = [suspects.begin(PATH, body) for _ in range(3)]
    backend.mark_down("it closed the connection")
    for failures in copies:
        failures.add(backend, "it closed the connection")
        suspects.end(PATH, body, failures)
    assert len(suspects.begin(PATH, body)) == 1
    assert len(suspects.begin(PATH, {"prompt": "y"})) == 0
    again = suspects.begin(PATH, body)
    backend.mark_up()
    backend.mark_down("it closed the connection")
    again.add(backend, "it closed the connection")
    suspects.end(PATH, body, again)
    assert suspects.begin(PATH, body).exhausted


def test_what_is_over_is_not_kept():
    clock = Clock()
    suspects, backend = Suspects(clock), Backend(Role.DECODE, "http://d")
    for prompt in ("x", "y"):
        failures = suspects.begin(PATH, {"prompt": prompt})
        failures.add(backend, "it closed the connection")
        suspects.end(PATH, {"prompt": prompt}, failures)
    assert len(suspects) == 2
    clock.now += REMEMBERED_SECONDS + 1
    suspects.begin(PATH, {"prompt": "z"})
    assert len(suspects) == 0
