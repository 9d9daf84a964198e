"""What the router's own `/metrics` counts."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.clock import Clock
from support.waiting import wait_for

pytestmark = pytest.mark.slow

NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}


def samples(scene) -> dict[tuple[str, ...], float]:
    """Every sample of the router, by its name without the prefix and its labels in alphabetical order."""
    page = scene.client.get("/metrics").text
    return {
        (
            one.name.removeprefix("kvferry_router_"),
            *(one.labels[name] for name in sorted(one.labels)),
        ): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }


def outcomes(scene) -> dict[tuple[str, ...], float]:
    return {key[1:]: value for key, value in samples(scene).items() if key[0] == "requests_total"}


def test_requests_are_counted_by_how_they_ended(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()], api_keys=("key",))
    assert scene.complete().status_code == 401
    scene.client.headers["authorization"] = "Bearer key"
    assert scene.complete().status_code == scene.complete(stream=True).status_code == 200
    assert scene.complete(prompt_logprobs=1).status_code == 200
    assert scene.client.get("/v1/models").status_code == 200
    assert scene.client.post("/v1/completions", content=b"{").status_code == 400
    scene.prefill[0].hands_over = None
    assert scene.complete().status_code == 200
    scene.decode[0].dies_after = 1
    assert b"engine_failed" in scene.complete(stream=True, use_beam_search=True).content
    expected = {
        ("failed", "401"): 1,
        ("split", ""): 2,
        ("decode", "prompt_logprobs"): 1,
        ("passed", ""): 1,
        ("failed", "400"): 1,
        ("decode", "no_kv"): 1,
        ("failed", "broken"): 1,
    }
    wait_for(lambda: outcomes(scene) == expected)


def test_times_and_bytes_are_those_of_bodies(stage, fake, kv):
    scene = stage([fake(hands_over=kv, delay_seconds=0.2)], [fake()])
    answer = scene.complete()
    wait_for(lambda: outcomes(scene) == {("split", ""): 1})
    found = samples(scene)
    assert found["received_bytes_total",] == len(answer.request.content)
    assert found["sent_bytes_total",] == len(answer.content)
    times = [found[f"{name}_seconds_sum",] for name in ("prefill", "first_byte", "request")]
    assert 0.2 <= times[0] <= times[1] <= times[2]


def test_a_retry_after_a_failure_has_no_ticket(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=500), fake()])
    assert scene.complete().status_code == 200
    wait_for(lambda: outcomes(scene) == {("decode", "engine_failed"): 1})


def test_a_prefill_engine_that_is_drained_rests_and_its_requests_are_no_split(stage, fake, kv):
    drained = fake(hands_over={**NOTHING, "remote_stopped": True})
    scene = stage([drained, other := fake(hands_over=kv)], [fake()], clock=(clock := Clock()))
    for _ in range(8):
        assert scene.complete().status_code == 200
    assert (drained.asked, other.asked) == (1, 8)
    wait_for(lambda: outcomes(scene) == {("split", ""): 8})
    drained.hands_over = kv
    clock.now += 16
    assert [scene.complete().status_code for _ in range(2)] == [200] * 2
    assert (drained.asked, other.asked) == (2, 9), "it is asked again from time to time"


def test_an_engine_that_offers_no_kv_of_a_prompt_is_counted_as_such_and_is_asked_again(stage, fake):
    scene = stage([engine := fake(hands_over=NOTHING), fake(hands_over=NOTHING)], [fake()], clock=Clock())
    for _ in range(4):
        assert scene.complete().status_code == 200
    assert engine.asked == 2
    assert not any("kv_transfer_params" in body for body in scene.decode[0].bodies)
    wait_for(lambda: outcomes(scene) == {("decode", "no_kv"): 4})


def test_requests_under_way_and_the_states_of_engines_are_those_of_the_moment(stage, fake, kv, nobody):
    scene = stage([fake(hands_over=kv), nobody], [fake(event_seconds=60)])
    with scene.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        next(events := answer.iter_raw())
        found = samples(scene)
        assert found["active_requests",] == 1
        assert found["engine_requests", "decode", scene.decode[0].url] == 1
        wait_for(lambda: samples(scene)["engine_state", "prefill", "down", nobody] == 1)
        events.close()
    assert found["engine_state", "decode", "up", scene.decode[0].url] == 1
    wait_for(lambda: outcomes(scene) == {("left", ""): 1})
    assert samples(scene)["active_requests",] == 0


def test_two_routers_of_one_process_count_apart(stage, fake, kv):
    scenes = [stage([fake(hands_over=kv)], [fake()], **settings) for settings in ({}, {})]
    scenes[0].complete()
    wait_for(lambda: outcomes(scenes[0]) == {("split", ""): 1})
    assert outcomes(scenes[1]) == {}
