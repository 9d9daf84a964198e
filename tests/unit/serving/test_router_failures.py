"""What a caller gets when engines fail, and what engines see when callers leave."""

import itertools
import json
import socket
from urllib.parse import urlsplit

import anyio
import pytest

from kvferry.tools.serving.role import Role
from kvferry.tools.serving.router.backends import Backend
from kvferry.tools.serving.router.bodies import kv_params_of, prefill_body
from kvferry.tools.serving.router.endpoint import ActiveRequests, RouterEndpoint
from kvferry.tools.serving.router.failures import failure_of
from kvferry.tools.serving.router.metrics import RouterMetrics
from kvferry.tools.serving.router.replies import Reply
from kvferry.tools.serving.router.upstream import Hop
from kvferry.transport.offer import MAX_UNWANTED, read_wanted
from support.clock import Clock
from support.waiting import wait_for

pytestmark = pytest.mark.slow

STREAM = {"model": "m", "prompt": "x", "stream": True}


def events(answer) -> list[bytes]:
    return [event for event in answer.content.split(b"\n\n") if event]


def test_prefill_goes_to_another_engine_if_one_is_dead(stage, fake, kv, nobody):
    scene = stage([nobody, fake(hands_over=kv)], [fake()])
    for _ in range(3):
        assert scene.complete().status_code == 200
    assert [body["kv_transfer_params"] for body in scene.decode[0].bodies] == [kv] * 3


@pytest.mark.parametrize("status", [500, 503, 429])
def test_prefill_goes_to_another_engine_if_one_refuses(stage, fake, kv, status):
    scene = stage([fake(status=status), fake(hands_over=kv)], [fake()])
    assert scene.complete().status_code == 200
    assert scene.decode[0].bodies[0]["kv_transfer_params"] == kv


@pytest.mark.parametrize("status", [503, 429])
def test_busy_engines_do_not_count_as_failures_however_many(stage, fake, kv, status):
    busy = [fake(status=status) for _ in range(3)]
    scene = stage([*busy, fake(hands_over=kv)], [*(fake(status=status) for _ in range(3)), fake()])
    for _ in range(4):
        assert scene.complete().status_code == 200
    assert scene.decode[0].bodies[0]["kv_transfer_params"] == kv, "of the prefill engine that was not busy"


def test_decode_engine_gets_the_callers_body_without_any_prefill_engine(stage, fake, nobody):
    scene = stage([nobody], [fake()])
    answer = scene.client.post("/v1/completions", json=STREAM)
    assert events(answer)[-1] == b"data: [DONE]"
    assert scene.decode[0].bodies == [STREAM]


def test_next_prefill_engine_is_asked_if_one_hands_over_no_kv(stage, fake, kv):
    scene = stage([fake(), fake(hands_over=kv)], [fake()])
    scene.complete()
    assert scene.decode[0].bodies[0]["kv_transfer_params"] == kv
    alone = stage([fake(hands_over={}), fake(hands_over="nonsense")], [fake()])
    assert alone.complete().status_code == 200
    assert "kv_transfer_params" not in alone.decode[0].bodies[0]


@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"\xff", b"[]", b"5", b"[" * 100_000, b"{}", b'{"kv_transfer_params": {}}',
     b'{"kv_transfer_params": [1]}'],
    ids=lambda answer: repr(answer[:30]),
)  # fmt: skip
def test_answer_without_kv_transfer_params_hands_over_no_kv(answer):
    assert kv_params_of(answer) is None


def test_prefill_engine_without_hand_over_is_logged_once_per_change(stage, fake, kv, caplog):
    engine = fake()
    scene = stage([engine], [fake()])
    for engine.hands_over in (None, None, kv, kv, None):
        scene.complete()
    said = [line for line in caplog.messages if engine.url in line]
    assert ["without kv_transfer_params" in line for line in said] == [True, False, True]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_decode_engine_has_the_last_word_on_a_request_that_a_prefill_engine_refuses(
    stage, fake, status, caplog
):
    scene = stage([fake(status=status), fake(status=status)], [decode := fake(status=status)])
    answer = scene.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "no such model")
    assert sum(len(engine.raw) for engine in scene.prefill) == 1
    assert "kv_transfer_params" not in decode.bodies[0]
    assert "refuses" not in caplog.text
    decode.status = 200
    assert scene.complete().status_code == 200
    assert (
        f"refuses requests that decode engine {decode.url} accepts (status {status}: no such" in caplog.text
    )
    assert 'requests_total{outcome="decode",reason="refused"} 1.0' in scene.client.get("/metrics").text


def test_fields_that_a_decode_engine_refused_cost_no_second_prefill(stage, fake, kv):
    scene = stage([prefill := fake(hands_over=kv)], [decode := fake(status=400)])
    for prompt in ("a", "b"):
        assert scene.complete(prompt=prompt).status_code == 400
    assert len(prefill.raw) == 1
    decode.status = 200
    assert scene.complete(temperature=0.5).status_code == 200
    assert len(prefill.raw) == 2, "other fields"
    for prompt in ("c", "d"):
        assert scene.complete(prompt=prompt).status_code == 200
    assert len(prefill.raw) == 3, "they are accepted now"


def test_names_of_unwanted_kv_survive_a_refused_request(stage, fake, kv):
    scene = stage([prefill := fake(hands_over=kv)], [decode := fake(status=500)])
    assert scene.complete().status_code == 500
    decode.status, prefill.status = 200, 400
    assert scene.complete().status_code == 200
    prefill.status = 200
    assert scene.complete().status_code == 200
    (first, _), _, (_, unwanted) = names(prefill)
    assert first in unwanted


def test_prefill_engine_that_is_back_is_asked_again(stage, fake, kv, nobody, serve_app):
    back = fake(hands_over=kv)
    scene = stage([nobody], [fake()])
    scene.complete()
    with serve_app(back.app(), urlsplit(nobody).port):
        wait_for(lambda: scene.complete().status_code == 200 and back.raw)
    assert "kv_transfer_params" in scene.decode[0].bodies[-1]


def test_error_names_both_decode_engines_that_failed(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=500), fake(status=500), fake()])
    answer = scene.complete()
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")
    assert all(engine.url in answer.json()["error"]["message"] for engine in scene.decode[:2])
    assert scene.decode[2].raw == []


@pytest.mark.parametrize(("healthy", "status"), [(True, 500), (False, 503)])
def test_server_error_of_the_only_decode_engine_is_relayed_unless_it_is_being_stopped(
    stage, fake, kv, healthy, status
):
    scene = stage([fake(hands_over=kv)], [engine := fake(status=500)], probe_seconds=3600.0)
    scene.client.get("/health")
    engine.healthy = healthy
    answer = scene.complete()
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == (None if healthy else "10")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("status", [500, 503, 429])
def test_engine_that_refuses_rests_and_no_engine_is_down(stage, fake, kv, status, role):
    engines = {"prefill": [fake(hands_over=kv), fake(hands_over=kv)], "decode": [fake(), fake()]}
    engines[role][0].status = status
    scene = stage(engines["prefill"], engines["decode"], clock=Clock())
    for _ in range(3):
        assert scene.complete().status_code == 200
    assert [len(engine.raw) for engine in engines[role]] == [1, 3]
    health = scene.client.get("/health").json()
    assert health["status"] == "ok"
    assert all(engine["up"] for engine in (*health["prefill"], *health["decode"]))


def test_rest_doubles_until_the_engine_answers():
    clock = Clock()
    backend, rests = Backend(Role.PREFILL, "http://p", clock), []
    for _ in range(7):
        backend.back_off()
        start = clock.now
        while backend.resting:
            clock.now += 0.5
        rests.append(clock.now - start)
    assert rests == [0.5, 1, 2, 4, 8, 16, 16]
    backend.note_success()
    backend.back_off()
    clock.now += 0.5
    assert not backend.resting


def test_resting_decode_engine_is_asked_if_it_is_the_only_one(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [engine := fake(status=429)], clock=Clock())
    assert scene.complete().status_code == 429
    engine.status = 200
    assert scene.complete().status_code == 200


def test_next_decode_engine_gets_the_kv_if_one_is_dead(stage, fake, kv, nobody):
    scene = stage([fake(hands_over=kv)], [nobody, fake()])
    assert scene.complete().status_code == 200
    assert scene.decode[1].bodies[0]["kv_transfer_params"] == kv


def test_decode_engine_that_is_down_is_asked_if_it_is_the_only_one(stage, fake, nobody, serve_app, caplog):
    port = urlsplit(nobody).port
    with serve_app(fake().app(), port):
        scene = stage([fake()], [nobody], probe_seconds=3600.0)
        assert scene.complete().status_code == 200
    assert scene.complete().status_code == 503
    with serve_app(fake().app(), port):
        assert scene.client.get("/v1/models").status_code == 200
        assert scene.complete().status_code == 200
    assert f"decode engine {nobody} is up again" in caplog.messages


def test_error_of_the_router_itself_has_openais_form(stage, fake):
    def failing() -> float:
        raise RuntimeError("nobody expects this")

    answer = stage([fake()], [fake()], clock=failing).complete()
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "router_error")


@pytest.mark.parametrize("stream", [False, True])
def test_next_decode_engine_computes_the_prompt_if_one_dies_before_its_answer(stage, fake, kv, stream):
    scene = stage([fake(hands_over=kv)], [fake(dies_after=0), fake()])
    answer = scene.complete(stream=stream)
    assert answer.status_code == 200
    assert b"moved" in answer.content
    assert b"error" not in answer.content
    assert "kv_transfer_params" in scene.decode[0].bodies[0]
    assert "kv_transfer_params" not in scene.decode[1].bodies[0]


def test_answer_is_503_in_openais_form_without_any_decode_engine(stage, fake, kv, nobody):
    scene = stage([fake(hands_over=kv)], [nobody])
    for stream in (False, True):
        answer = scene.complete(stream=stream)
        assert answer.status_code == 503
        assert answer.json()["error"].keys() == {"message", "type", "param", "code", "reason"}
        assert answer.json()["error"]["reason"] == "engine_unavailable"
    assert scene.client.get("/v1/models").status_code == 503


def test_refusal_of_the_last_decode_engine_is_relayed(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=503)])
    answer = scene.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no such model")


def test_client_error_of_a_decode_engine_is_the_answer(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(status=400), fake()])
    answer = scene.complete(stream=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such model")
    assert scene.decode[1].raw == []


def test_stream_ends_with_an_error_if_the_decode_engine_dies(stage, fake, kv, caplog):
    scene = stage([fake(hands_over=kv)], [fake(dies_after=2)])
    answer = scene.complete(stream=True)
    *before, last = events(answer)
    assert len(before) == 2
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["reason"] == "engine_failed"
    assert error.keys() == {"message", "type", "param", "code", "reason"}
    assert any(f"decode engine {scene.decode[0].url} is down" in line for line in caplog.messages)


def test_half_an_event_of_an_engine_that_died_is_not_relayed(stage, fake, kv):
    chunks = [b"data: 1\n\nda", b"ta", b"never"]
    scene = stage([fake(hands_over=kv)], [fake(chunks=chunks, dies_after=2)])
    first, last = events(scene.complete(stream=True))
    assert first == b"data: 1"
    assert last.startswith(b'data: {"error"')


def test_stream_without_its_last_event_ends_with_an_error(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(chunks=[b"data: 1\n\n"])])
    assert b"last event" in events(scene.complete(stream=True))[-1]


def leave_during(scene, body: dict, ready) -> None:
    """Send a request, and close the connection when `ready` says so."""
    raw = json.dumps(body).encode()
    address = scene.client.base_url
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection((address.host, address.port)) as sock:
        sock.sendall(head + raw)
        ready()


def test_caller_who_leaves_before_the_end_of_the_request_is_not_served():
    """What has come of its body may be a whole request."""
    served, sent = [], []
    half = {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": True}
    messages = itertools.chain([half], itertools.repeat({"type": "http.disconnect"}))

    async def handler(call, send):
        served.append(call)

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    endpoint = RouterEndpoint(handler, ActiveRequests(), Hop(), 1000, RouterMetrics(list))
    anyio.run(endpoint, {"method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    assert served == sent == []


START = {"type": "http.response.start", "status": 200, "headers": []}
PART, END = ({"type": "http.response.body", "body": b"x", "more_body": more} for more in (True, False))


@pytest.mark.parametrize(
    ("sent", "added"),
    [
        ((), ["http.response.start", "http.response.body"]),
        ((START,), ["http.response.body"]),
        ((START, PART), ["http.response.body"]),
        ((START, PART, END), []),
    ],
    ids=["nothing", "start", "part", "all"],
)
def test_answer_is_cut_short_only_if_a_part_is_missing(sent, added):
    ongoing, messages = ActiveRequests(), []

    async def handler(call, send):
        for message in sent:
            await send(message)
        ongoing.end()

    requests = iter([{"type": "http.request", "body": b"{}"}])

    async def receive():
        return next(requests, None) or await anyio.sleep_forever()

    async def send(message):
        messages.append(message)

    endpoint = RouterEndpoint(handler, ongoing, Hop(), 1000, RouterMetrics(list))
    anyio.run(endpoint, {"method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    assert messages[: len(sent)] == list(sent)
    assert [message["type"] for message in messages[len(sent) :]] == added
    assert not added or b"router_stopped" in messages[-1]["body"]


def test_caller_who_leaves_during_the_prefill_aborts_it(stage, fake, kv):
    scene = stage([fake(hands_over=kv, delay_seconds=60)], [fake()])
    leave_during(scene, STREAM, lambda: wait_for(lambda: scene.prefill[0].raw))
    wait_for(lambda: scene.prefill[0].aborted == 1)
    assert scene.decode[0].raw == []


@pytest.mark.parametrize("stream", [False, True])
def test_caller_who_leaves_before_the_answer_aborts_the_decode(stage, fake, kv, stream):
    scene = stage([fake(hands_over=kv)], [fake(delay_seconds=60)])
    leave_during(scene, {**STREAM, "stream": stream}, lambda: wait_for(lambda: scene.decode[0].raw))
    wait_for(lambda: scene.decode[0].aborted == 1)


def names(engine) -> list[tuple[str, list[str]]]:
    """The router's name for the KV of each prompt, and the names that it no longer wants."""
    given = [body["kv_transfer_params"] for body in engine.bodies]
    return [(one["remote_name"], one["remote_unwanted"]) for one in given]


def test_prefill_engine_learns_with_its_next_prompt_that_a_caller_has_left(stage, fake, kv):
    scene = stage([prefill := fake(hands_over=kv)], [decode := fake(delay_seconds=60)], probe_seconds=3600.0)
    for count in (1, 2):
        leave_during(scene, STREAM, lambda: wait_for(lambda: len(decode.raw) == count))  # noqa: B023
        wait_for(lambda: decode.aborted == count)  # noqa: B023
    decode.delay_seconds = 0.0
    for _ in range(2):
        assert scene.complete().status_code == 200
    (first, none), (second, one), (_, two), (_, after) = names(prefill)
    assert (none, one, two, after) == ([], [first], [second], [])


def test_idle_prefill_engine_learns_that_nobody_wants_its_kv(stage, fake, kv):
    scene = stage([prefill := fake(hands_over=kv)], [fake(status=500)])
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "X-Data-Parallel-Rank": "1"}
    scene.client.post("/v1/completions", json={"prompt": "x", "model": "m"}, headers=headers)
    wait_for(lambda: len(prefill.raw) == 2)
    asked, told = prefill.bodies
    unwanted = [asked["kv_transfer_params"]["remote_name"]]
    assert told == {
        "model": "m",
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {"remote_unwanted": unwanted},
    }
    assert prefill.headers[1]["authorization"] == "Bearer k"
    assert not prefill.headers[1].keys() & {"x-request-id", "x-data-parallel-rank"}


@pytest.mark.parametrize("answer", [{"status": 404}, {"hands_over": None}], ids=["rejected", "without KV"])
def test_prefill_engine_that_keeps_no_kv_is_told_nothing(stage, fake, kv, answer):
    scene = stage([prefill := fake(**answer)], [decode := fake(status=500)])
    assert scene.complete().status_code != 200
    prefill.status, prefill.hands_over, decode.status = 200, kv, 200
    assert scene.complete().status_code == 200
    assert names(prefill)[1][1] == []


def test_engine_accepts_as_many_names_as_the_router_keeps():
    backend = Backend(Role.PREFILL, "http://p")
    backend.unwanted.extend(f"{number:032x}" for number in range(1000))
    body = json.loads(prefill_body({"prompt": "x"}, None, "0" * 32, backend.take_unwanted()))
    assert len(read_wanted(body["kv_transfer_params"]).remote_unwanted) == MAX_UNWANTED


def test_prefill_engine_learns_that_the_decode_engines_failed(stage, fake, kv):
    scene = stage([prefill := fake(hands_over=kv)], [decode := fake(status=500)], probe_seconds=3600.0)
    assert scene.complete().status_code == 500
    decode.status = 200
    assert scene.complete().status_code == 200
    (first, _), (_, unwanted) = names(prefill)
    assert unwanted == [first]


def test_caller_who_leaves_during_a_stream_aborts_the_decode(stage, fake, kv):
    scene = stage([fake(hands_over=kv)], [fake(event_seconds=60)])
    with scene.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        next(answer.iter_raw())
    wait_for(lambda: scene.decode[0].aborted == 1)
    health = scene.client.get("/health").json()
    assert health["decode"][0]["up"], "a caller who left is no fault of the engine"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (json.dumps({"error": {"message": "x" * 1000}}), "status 500: " + "x" * 300),
        (json.dumps({"error": {"message": "one\nWARNING two"}}), "status 500: one WARNING two"),
        ("Internal Server Error", "status 500"),
        ("{}", "status 500"),
        ('{"error": "text"}', "status 500"),
        ("[" * 100_000, "status 500"),
    ],
    ids=["long", "lines", "text", "no error", "no message", "deep"],
)
def test_error_repeats_the_engines_message_shortened(body, said):
    assert failure_of(Reply(500, (), body.encode())) == said
