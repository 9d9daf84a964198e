"""A request that kills the engine it is sent to, over engines that are processes and really die."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from kvferry.tools.serving.devices import listen, url_of
from support.waiting import wait_for

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "mortal_engine.py"
POISON = {"prefill": "kills prefill", "decode": "kills decode"}


class Mortal(str):
    """The URL of an engine process.

    Attributes:
        process: it.
        log: gets the bodies of its requests.
    """

    __slots__ = ("log", "process")

    @property
    def seen(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def mortals(tmp_path):
    """Starts so many engines that die of their role's poison."""
    with contextlib.ExitStack() as stack:

        def start(role: str, count: int) -> list[Mortal]:
            engines = []
            for _ in range(count):
                with listen("127.0.0.1", 0) as sock:
                    engine = Mortal(url_of(sock))
                    engine.log = tmp_path / engine.rpartition(":")[2]
                    command = [
                        sys.executable,
                        str(PROGRAM),
                        POISON[role],
                        str(engine.log),
                        str(sock.fileno()),
                    ]
                    process = subprocess.Popen(command, pass_fds=[sock.fileno()])
                engine.process = stack.enter_context(process)
                stack.callback(process.kill)
                engines.append(engine)
            for engine in engines:
                wait_for(lambda url=engine: answers(url))
            return engines

        yield start


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def asked(engines, text: str) -> int:
    """Return the number of engines that got a prompt with this text. Poison ends them."""
    return sum(any(text in body["prompt"] for body in engine.seen) for engine in engines)


@pytest.mark.parametrize(("role", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
def test_request_that_kills_its_engine_is_tried_once_more_only(stage, fake, kv, mortals, role, stream):
    engines = {"prefill": [fake(hands_over=kv)], "decode": [fake()], role: mortals(role, 3)}
    scene = stage(engines["prefill"], engines["decode"])
    answer = scene.complete(prompt=POISON[role], stream=stream)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "engine_failed")
    assert "2 engines failed while working on this request" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false", "OpenAI's clients would send it again"
    assert asked(engines[role], POISON[role]) == 2
    assert scene.complete(prompt="well").status_code == 200


def test_deaths_of_prefill_and_decode_engines_count_together(stage, mortals):
    for prefill, decode, deaths in ((2, 1, (2, 0)), (1, 2, (1, 1))):
        scene = stage(mortals("prefill", prefill), mortals("decode", decode))
        assert scene.complete(prompt=POISON["prefill"] + POISON["decode"]).status_code == 500
        assert (asked(scene.prefill, POISON["prefill"]), asked(scene.decode, POISON["decode"])) == deaths


def test_other_requests_of_an_engine_that_died_are_tried_again(stage, fake, mortals):
    scene = stage(mortals("prefill", 3), [fake()])
    answers = []

    def ask():
        answers.append(scene.complete(prompt="late").status_code)

    others = [threading.Thread(target=ask) for _ in range(3)]
    for thread in others:
        thread.start()
    wait_for(lambda: sum(len(engine.seen) for engine in scene.prefill) == 3)
    scene.prefill[0].process.kill()
    for engine in scene.prefill:
        Path(f"{engine.log}.go").touch()
    for thread in others:
        thread.join()
    assert answers == [200] * 3
    assert sorted(len(engine.seen) for engine in scene.prefill) == [1, 1, 2]
    assert all("kv_transfer_params" in body for body in scene.decode[0].bodies)


def test_error_names_the_only_decode_engine_that_died_and_asks_for_a_later_retry(stage, fake, kv, mortals):
    scene = stage([fake(hands_over=kv)], mortals("decode", 1))
    answer = scene.complete(prompt=POISON["decode"])
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "engine_failed")
    assert "one engine failed while working on this request" in answer.json()["error"]["message"]
    assert scene.decode[0] in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "10"
    assert "x-should-retry" not in answer.headers
    assert scene.complete(prompt="well").status_code == 503, "it cannot be reached now, which is no failure"


def test_forwarded_request_that_kills_two_engines_is_logged_as_given_up_once(stage, fake, mortals, caplog):
    scene = stage([fake()], mortals("decode", 3))
    answer = scene.client.post("/tokenize", json={"prompt": POISON["decode"]})
    assert answer.status_code == 500
    assert asked(scene.decode, POISON["decode"]) == 2
    given_up = [line for line in caplog.messages if "is not tried again" in line]
    assert len(given_up) == 1
    assert "2 engines failed" in given_up[0]
    assert sum("is down" in line for line in caplog.messages) == 2


def test_server_error_of_an_engine_counts_as_a_failure_of_the_request(stage, fake, mortals):
    scene = stage(mortals("prefill", 3), [fake()])
    answer = scene.complete(prompt="500")
    assert "a fault of its own" in answer.json()["error"]["message"]
    assert sorted(len(engine.seen) for engine in scene.prefill) == [0, 1, 1]
    assert scene.decode[0].raw == []
    up = [engine["up"] for engine in scene.client.get("/health").json()["prefill"]]
    assert up == [True] * 3


def test_unreachable_engines_do_not_count_as_failures(stage, fake, kv, nobody):
    scene = stage([nobody] * 3 + [fake(hands_over=kv)], [nobody] * 3 + [fake()])
    answer = scene.complete(prompt="well")
    assert answer.status_code == 200
    assert scene.decode[3].bodies[0]["kv_transfer_params"] == kv
