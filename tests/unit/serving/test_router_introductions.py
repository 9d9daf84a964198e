"""A router's engines are connected to each other before the first request of a client."""

from __future__ import annotations

import pytest

from kvferry.tools.serving.router.fleet import _AT_ONCE
from support.waiting import wait_for

QUICK = {"introduce": True, "probe_seconds": 0.02}


def offer(name: str) -> dict:
    return {"do_remote_prefill": True, "remote_engine_id": name}


def offers(engine) -> list:
    """The offers in the requests that an engine has got so far, in the order of their names."""
    found = [body["kv_transfer_params"] for body in engine.bodies]
    return sorted(found, key=lambda params: params["remote_engine_id"])


def later(engine) -> None:
    """Wait for some more probes of an engine."""
    before = engine.probes
    wait_for(lambda: engine.probes > before + 3)


def test_each_decode_engine_gets_a_short_prompt_from_each_prefill_engine_once(stage, fake):
    prefill = [fake(hands_over=offer(name)) for name in "ab"]
    decode = [fake(), fake()]
    stage(prefill, decode, **QUICK)
    wait_for(lambda: all(len(engine.raw) == 2 for engine in decode))
    assert all(offers(engine) == [offer("a"), offer("b")] for engine in decode)
    later(decode[0])
    assert [engine.asked for engine in (*prefill, *decode)] == [2, 2, 2, 2]
    for engine in (*prefill, *decode):
        assert {(str(body["prompt"]), body["max_tokens"]) for body in engine.bodies} == {(str([0] * 8), 1)}


def test_an_engine_that_does_both_is_not_introduced_to_itself(stage, fake):
    both, decode = fake(hands_over=offer("a")), fake()
    stage([both], [both, decode], **QUICK)
    wait_for(lambda: offers(decode) == [offer("a")])
    later(both)
    assert (both.asked, decode.asked) == (1, 1)


@pytest.mark.parametrize("restarted", [0, 1], ids=["prefill", "decode"])
def test_an_engine_that_comes_back_is_introduced_again(stage, fake, restarted):
    engines = fake(hands_over=offer("a")), fake()
    scene = stage([engines[0]], [engines[1]], **QUICK)
    wait_for(lambda: len(engines[1].raw) == 1)
    engines[restarted].healthy = False
    wait_for(lambda: scene.client.get("/health").json()["status"] != "ok")
    engines[restarted].healthy = True
    wait_for(lambda: len(engines[1].raw) == 2)
    later(engines[1])
    assert [engine.asked for engine in engines] == [2, 2]


def test_an_engine_that_is_added_meets_the_others(stage, fake, serve_app, tmp_path):
    file, first, second = tmp_path / "engines", fake(hands_over=offer("a")), fake(hands_over=offer("b"))
    decode = fake()
    scene = stage([first], [decode], engines_file=file, **QUICK)
    wait_for(lambda: offers(decode) == [offer("a")])
    with serve_app(second.app()) as url:
        file.write_text("\n".join([f"prefill {first.url}", f"prefill {url}", f"decode {decode.url}"]))
        wait_for(lambda: offers(decode) == [offer("a"), offer("b")])
        later(decode)
        assert (first.asked, second.asked, decode.asked) == (1, 1, 2)
        assert scene.complete().status_code == 200


def test_engines_get_the_key_that_the_router_has_for_them(stage, fake):
    engines = fake(hands_over=offer("a")), fake()
    stage([engines[0]], [engines[1]], engine_key="theirs", **QUICK)
    wait_for(lambda: len(engines[1].raw) == 1)
    for engine in engines:
        assert engine.headers[0]["authorization"] == "Bearer theirs"
        assert engine.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("status", [401, 500])
def test_a_prefill_engine_that_does_not_take_the_prompt_is_left_alone(stage, fake, caplog, status):
    prefill, decode = fake(hands_over=offer("a"), status=status), fake()
    stage([prefill], [decode], **QUICK)
    wait_for(lambda: prefill.asked == 1)
    later(prefill)
    assert (prefill.asked, decode.asked) == (1, 0)
    assert "without kv_transfer_params" not in caplog.text


def test_a_prefill_engine_without_kvferry_is_named_before_any_request(stage, fake, caplog):
    prefill, decode = fake(), fake()
    stage([prefill], [decode], **QUICK)
    wait_for(lambda: f"prefill engine {prefill.url} answered without kv_transfer_params" in caplog.text)
    assert decode.asked == 0


def test_kv_that_a_decode_engine_does_not_take_is_given_back_with_the_next_prompt(stage, fake):
    prefill, decode = fake(hands_over=offer("a")), fake(status=500)
    scene = stage([prefill], [decode], **QUICK)
    wait_for(lambda: decode.asked == 1)
    later(decode)
    decode.status = 200
    assert scene.complete().status_code == 200
    greeting, prompt = (body["kv_transfer_params"] for body in prefill.bodies)
    assert prompt["remote_unwanted"] == [greeting["remote_name"]]


def test_engines_that_meet_by_themselves_get_no_prompt_of_the_router(stage, fake):
    prefill, decode = fake(hands_over=offer("a")), fake()
    stage([prefill], [decode], probe_seconds=0.02)
    later(prefill)
    later(decode)
    assert (prefill.asked, decode.asked) == (0, 0)


def test_so_many_hand_overs_are_under_way_at_a_time(stage, fake):
    prefill, decode = fake(hands_over=offer("a"), delay_seconds=3600.0), [fake() for _ in range(_AT_ONCE + 2)]
    stage([prefill], decode, **QUICK)
    wait_for(lambda: prefill.asked == _AT_ONCE)
    later(prefill)
    assert prefill.asked == _AT_ONCE
    prefill.delay_seconds = 0.0
    wait_for(lambda: all(engine.asked == 1 for engine in decode))
