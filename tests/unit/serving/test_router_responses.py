"""Responses stay with the decode engine that keeps them, and clients need only their ids."""

from __future__ import annotations

import anyio
import pytest

from kvferry.tools.serving.router.backends import Engines
from kvferry.tools.serving.router.responses import Responses, with_response_id
from support.waiting import wait_for

pytestmark = pytest.mark.slow

PATH = "/v1/responses"


def made(scene, **more) -> str:
    """Id of a response that the router had a decode engine make."""
    before = [len(engine.raw) for engine in scene.decode]
    assert scene.client.post(PATH, json={"input": "x", **more}).status_code == 200
    grown = zip(scene.decode, before, strict=True)
    (engine,) = (one for one, count in grown if len(one.raw) > count)
    return engine.bodies[-1]["request_id"]


def keeper(scene, name: str):
    return next(engine for engine in scene.decode if name in engine.kept)


def asked(engines) -> int:
    return sum(len(engine.about) for engine in engines)


def test_a_response_is_asked_for_at_its_engine_though_that_prefills_now():
    engines = Engines(["http://a:1"], ["http://b:1", "http://c:1"])
    _, keeper, other = engines.known
    name = with_response_id(PATH, {}, keeper)["request_id"]
    engines.replace(["http://b:1"], ["http://a:1", "http://c:1"])
    responses = Responses(engines, None)  # type: ignore[arg-type]
    assert anyio.run(responses.keeper_of, name, ()) is keeper
    engines.replace(["http://a:1", "http://b:1"], ["http://c:1"])
    assert anyio.run(responses.keeper_of, "chosen by the caller", ()) is other, "the others do not answer"


@pytest.fixture
def scene(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake() for _ in range(3)])
    # An engine that gets a second probe has answered the first, so the router may choose it.
    wait_for(lambda: all(engine.probes > 1 for engine in scene.decode))
    return scene


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}, {"store": True}], ids=str)
def test_a_response_is_continued_read_and_cancelled_where_it_was_made(scene, more):
    names = [made(scene, **more) for _ in range(3)]
    assert len({keeper(scene, name).url for name in names}) == 3
    for name in [name for name in names for _ in range(3)]:
        continued = scene.client.post(PATH, json={"input": "y", "previous_response_id": name})
        assert continued.status_code == 200
        for answer in (scene.client.get(f"{PATH}/{name}"), scene.client.post(f"{PATH}/{name}/cancel")):
            assert answer.json() == {"id": name, "of": keeper(scene, name).url}
    assert asked(scene.decode) == 18, "no engine was asked that cannot have the response"


def test_another_router_finds_the_engine_by_the_id_alone(scene, stage):
    name = made(scene)
    other = stage(scene.prefill, scene.decode[::-1])
    assert other.client.get(f"{PATH}/{name}").json()["of"] == keeper(scene, name).url
    assert asked(scene.decode) == 1


def test_engines_are_asked_in_turn_for_an_id_that_the_client_has_chosen(scene):
    assert made(scene, request_id="mine/1") == "mine/1"
    scene.decode[0].kept, scene.decode[2].kept = [], ["mine"]
    continued = scene.client.post(PATH, json={"input": "y", "previous_response_id": "mine"})
    assert continued.status_code == 200
    assert scene.decode[2].bodies[-1]["previous_response_id"] == "mine"
    assert scene.client.get(f"{PATH}/mine").json()["of"] == scene.decode[2].url


def test_an_id_with_odd_characters_is_only_an_id(scene):
    for path in ("a%3Fstream=1", "a%23b", "%0d%0a"):
        assert scene.client.get(f"{PATH}/{path}").status_code == 404
        assert scene.decode[0].about[-1].startswith("GET /v1/responses/")
        assert scene.decode[0].about[-1].endswith("?")


def test_an_unknown_id_is_an_error_in_vllms_form(scene):
    for answer in (
        scene.client.get(f"{PATH}/resp_0"),
        scene.client.post(f"{PATH}/resp_0/cancel"),
        scene.client.post(PATH, json={"input": "x", "previous_response_id": "resp_0"}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
        assert error["message"].startswith("Response with id 'resp_0' not found on any decode engine; ")
        assert answer.headers["x-request-id"]


def test_the_error_names_the_engine_that_has_gone_with_the_response(stage, fake, kv, nobody):
    scene = stage([fake(hands_over=kv)], [fake(), nobody])
    for answer in (
        scene.client.get(f"{PATH}/resp_0"),
        scene.client.post(PATH, json={"input": "x", "previous_response_id": "resp_0"}),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert f"{nobody} cannot be reached" in answer.json()["error"]["message"]


def test_the_error_names_the_engine_that_the_id_names(stage, fake, kv, serve_app):
    engine = fake()
    with serve_app(engine.app()) as engine.url:
        scene = stage([fake(hands_over=kv)], [engine, fake()])
        name = next(name for name in (made(scene), made(scene)) if name in engine.kept)
    for answer in (
        scene.client.get(f"{PATH}/{name}"),
        scene.client.post(PATH, json={"input": "x", "previous_response_id": name}),
    ):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert f"{engine.url} cannot be reached" in answer.json()["error"]["message"]
    assert asked(scene.decode) == 0


def test_an_only_engine_answers_for_every_id(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake()])
    assert scene.client.get(f"{PATH}/resp_0").json()["error"]["message"].startswith("no resp_0 at ")
    assert asked(scene.decode) == 1


def test_engines_are_asked_with_the_clients_key(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(key="k", kept=["a"]), fake(key="k", kept=["b"])])
    assert scene.client.get(f"{PATH}/b").status_code == 401
    headers = {"Authorization": "Bearer k"}
    assert scene.client.get(f"{PATH}/b", headers=headers).json()["of"] == scene.decode[1].url


def test_a_response_is_streamed_with_its_query(scene):
    name = made(scene)
    engine = keeper(scene, name)
    engine.chunks = [b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n"]
    answer = scene.client.get(f"{PATH}/{name}?stream=true&starting_after=3")
    assert answer.content == b"".join(engine.chunks)
    assert engine.about == [f"GET {PATH}/{name}?stream=true&starting_after=3"]


def test_a_stream_that_breaks_at_once_does_not_mark_the_engine_as_down(scene):
    name = made(scene)
    engine = keeper(scene, name)
    engine.dies_after = 0
    answer = scene.client.get(f"{PATH}/{name}?stream=true")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")
    assert engine.url in answer.json()["error"]["message"]
    engines = {one["url"]: one["up"] for one in scene.client.get("/health").json()["decode"]}
    assert engines[engine.url]


def test_a_failing_engine_is_not_replaced_for_a_response_that_only_it_keeps(scene):
    name = made(scene)
    engine = keeper(scene, name)
    engine.status = 503
    answer = scene.client.post(PATH, json={"input": "y", "previous_response_id": name})
    assert (answer.status_code, len(engine.raw)) == (503, 2)
    assert sum(len(one.raw) for one in scene.decode) == 2


def test_a_trusted_fronts_response_gets_an_id_too(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(), fake()], trust_kv_params=True)
    name = made(scene, kv_transfer_params=kv)
    assert keeper(scene, name).bodies[0]["kv_transfer_params"] == kv
    assert scene.client.get(f"{PATH}/{name}").json()["of"] == keeper(scene, name).url
