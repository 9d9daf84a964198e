"""The servers of `benchmarks handover --served`, with scripts in place of vLLM's."""

import asyncio
import importlib.metadata
import json
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from benchmarks.handover.client import Answer, get, post_all
from benchmarks.handover.engine import Setup
from benchmarks.handover.mix import MixRequest
from benchmarks.handover.model import MODELS
from benchmarks.handover.nixl_plus import favour_nixl
from benchmarks.handover.served import ServerPair, server_pair
from benchmarks.handover.server import Server, server_spec
from benchmarks.handover.server_plugins import BOUND, NIXL_PLUS, WITHOUT_AMX, nixl_plus, without_amx
from benchmarks.handover.stream import serve_all
from benchmarks.plugins import plugin_environment
from kvferry.common.errors import ConfigError, TransferError
from kvferry.tools.serving.launch import EngineSpec, Fleet, LaunchError, Role
from support.ports import reserved_port
from support.waiting import wait_for

SETUP = Setup(
    model=Path("model"), connector="nixl+", port=7, longest=768, requests=8, cache_bytes=1 << 20,
    engine=dict(MODELS[2].engine),
)  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Answers a number with itself, "first" once "second" is answered, and "never" not at all."""

    second_answered = threading.Event()

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(b"so much")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if body == b"close":
            return
        if body == b"refuse":
            self.send_error(400)
            return
        if body == b'"never"':
            self.rfile.read(1)  # until the client has gone
            return
        if body == b'"first"':
            self.second_answered.wait(60)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client may have gone
            self.wfile.write(body)
        if body == b'"second"':
            self.second_answered.set()


@pytest.fixture
def port():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_requests_are_sent_together_and_each_answer_has_its_times(port):
    first, second = post_all(port, "/x", [b'"first"', b'"second"'], 60.0)
    assert (first.parsed(), second.parsed()) == ("first", "second")
    assert first.sent < second.sent < first.answered


def test_request_that_a_server_does_not_answer_is_an_error(port):
    for body, why in (
        (b"close", "closed|reset"),
        (b"refuse", "answered with 400"),
        (b'"never"', "within 0.1 s"),
    ):
        with pytest.raises(TransferError, match=why):
            post_all(port, "/x", [body], 0.1 if body == b'"never"' else 30.0)
    assert get(port, "/metrics", 30.0) == "so much"
    with pytest.raises(TransferError, match="/other was answered with 404"):
        get(port, "/other", 30.0)


class PlayedServer:
    """A server that gives a token to each request, and has loaded a number of tokens in all."""

    def __init__(self, loaded: int = 0, port: int = 0) -> None:
        self.loaded, self.bodies, self.settled, self.port = loaded, [], 0, port

    def complete(self, bodies):
        self.bodies = [json.loads(body) for body in bodies]
        body = {"choices": [{"token_ids": [5]}], "kv_transfer_params": {"remote_host": "here"}}
        return [Answer(1.0, 1.5, json.dumps(body).encode()) for _ in bodies]

    def settle(self):
        self.settled += 1

    def loaded_tokens(self):
        return self.loaded


def test_server_pair_passes_the_prefill_servers_offer_to_the_decode_server():
    prefill, decode = PlayedServer(), PlayedServer(6)
    pair = ServerPair("model", prefill, decode)
    result = pair.hand_over([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert result.loaded  # a connector leaves the last token of each prompt to the decode engine
    assert (result.tokens, result.handover.seconds) == ([5, 5], 0.5)
    assert prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"]
    assert decode.bodies[1]["kv_transfer_params"] == {"remote_host": "here"}
    assert decode.bodies[1]["prompt"] == [5, 6, 7, 8]
    assert (prefill.settled, decode.settled) == (1, 1)
    decode.loaded += 5
    assert not pair.hand_over([[1, 2, 3, 4], [5, 6, 7, 8]]).loaded


EVENTS = (
    '{"choices": [{"token_ids": [5]}]}',
    '{"choices": [{"token_ids": [6, 7]}]}',
    '{"choices": [{"token_ids": null, "finish_reason": "length"}]}',
    '{"choices": [], "usage": {}}',
    "[DONE]",
)


class Streaming(BaseHTTPRequestHandler):
    """Offers KV if asked to keep it. Otherwise streams three tokens, in pieces that cut events in two."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        if body["prompt"] == [0]:
            self.send_error(400)
            return
        self.send_response(200)
        if not body["stream"]:
            answer = json.dumps({"kv_transfer_params": {"remote_host": "here"}}).encode()
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = ['{"error": "no room"}'] if body["prompt"] == [9] else EVENTS
        stream = "".join(f"data: {event}\n\n" for event in events).encode()
        for piece in (stream[:60], stream[60:], b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            time.sleep(0.01)


@pytest.fixture
def streaming():
    """The port of a server that streams."""
    Streaming.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_mix_is_streamed_from_the_decode_server_and_each_token_has_its_time(streaming):
    prefill, decode = PlayedServer(port=streaming), PlayedServer(port=streaming)
    requests = [MixRequest([1, 2, 3], 3) for _ in range(5)]
    decode.loaded = 4  # of the ten tokens that a connector may load
    times, tokens = ServerPair("model", prefill, decode).serve(requests, 2)
    assert (tokens, times.recomputed) == ([5] * 5, pytest.approx(0.6))
    assert (prefill.settled, decode.settled) == (1, 1)
    for one in times.requests:
        first, second, third = one.tokens
        assert one.sent < first < second == third, "one event has two tokens"
    sent = [body.get("kv_transfer_params", {}) for body in Streaming.bodies]
    assert sum(one == {"remote_host": "here"} for one in sent) == 5
    assert sum(one.get("do_remote_decode", False) for one in sent) == 5


def test_one_server_gets_the_requests_without_a_transfer(streaming):
    times, _ = ServerPair("model", None, PlayedServer(port=streaming)).serve([MixRequest([1, 2], 3)], 1)
    assert times.recomputed == 0
    (body,) = Streaming.bodies
    assert "kv_transfer_params" not in body


@pytest.mark.parametrize(
    ("prompt", "answer", "why"),
    [([1], 4, "3 tokens in place of 4"), ([0], 3, "answered with http/1.1 400"), ([9], 3, "no room")],
)
def test_mix_with_an_answer_that_is_not_right_is_an_error(streaming, prompt, answer: int, why: str):
    pair = ServerPair("model", None, PlayedServer(port=streaming))
    with pytest.raises(TransferError, match=why):
        pair.serve([MixRequest(prompt, answer)], 1)
    with pytest.raises(TransferError, match=r"no answer to a mix within 0\.05 s"):
        serve_all([1], 1, lambda _: asyncio.sleep(60), 0.05)


@pytest.mark.slow
def test_nixl_plus_rests_between_polls_as_kvferry_does(monkeypatch):
    from nixl import _api
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

    started: list[Any] = []
    names = _api.nixl_agent.__init__.__globals__
    monkeypatch.setitem(names, "nixlBind", names["nixlBind"])
    monkeypatch.setattr(NixlBaseConnector, "__init__", lambda _, config, role: started.append(role))
    monkeypatch.setattr(NixlBaseConnector, "register_kv_caches", NixlBaseConnector.register_kv_caches)
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    spin = shm_broadcast.sched_yield
    favour_nixl()
    assert shm_broadcast.sched_yield is spin
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    NixlBaseConnector.__init__(object(), config, "worker")
    assert (started, shm_broadcast.sched_yield is spin) == (["worker"], False)


def test_a_server_has_the_settings_of_the_engine():
    spec = server_spec(SETUP, Role.DECODE, 80, {"PYTHONPATH": "here"})
    assert spec.kv_transfer["kv_connector"] == "NixlConnector"
    assert {"--max-model-len=768", "--max-num-seqs=8", "--no-enable-prefix-caching"} < set(spec.arguments)
    assert spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7"
    assert spec.environment["PYTHONPATH"] == "here"
    assert (spec.environment["OMP_NUM_THREADS"], spec.tensor_parallel) == ("1", 1)
    alone = server_spec(replace(SETUP, connector="aggregated", ranks=2, threads=2), Role.BOTH, 80, {})
    assert (alone.kv_transfer, alone.tensor_parallel) == (None, 2)
    assert alone.environment["OMP_NUM_THREADS"] == "2"


def test_plugins_are_found_in_their_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    environment = plugin_environment(tmp_path / "plugins", without_amx, nixl_plus)
    (installed,) = importlib.metadata.distributions(path=[environment["PYTHONPATH"].split(":")[0]])
    found = {one.name: one for one in installed.entry_points}
    assert {one.group for one in installed.entry_points} == {"vllm.general_plugins"}
    assert environment["VLLM_PLUGINS"].split(",") == ["other", *found]
    assert [one.load() for one in found.values()] == [without_amx, nixl_plus]
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "VLLM_PLUGINS" not in plugin_environment(tmp_path / "more", without_amx)


@dataclass(frozen=True)
class Script(EngineSpec):
    """A Python script in place of vLLM."""

    code: str = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("import sys; print('loading\\nValueError: no room\\nso I end'); sys.exit(3)", LaunchError),
     ("import sys; print('x.py: error: unrecognized: --foo\\nso I end'); sys.exit(2)", ConfigError)],
)  # fmt: skip
def test_server_that_does_not_start_is_an_error_with_its_last_lines(code, kind, tmp_path):
    def script(setup: Setup, role: Role, port: int, environment: dict[str, str]) -> EngineSpec:
        return Script(name=str(role), role=role, model="", port=port, environment=environment, code=code)

    pair = server_pair(SETUP, spec_of=script, folder_of=lambda _: tmp_path)
    with pytest.raises(kind, match=r"(?s)ended with exit code.*\n  so I end"), pair:
        pass
    assert (tmp_path / "prefill.log").exists()  # the message names it


HEALTHY = """
import http.server, sys
print(*sys.argv[2:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Healthy(EngineSpec):
    """A server that is ready at once."""

    signs: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return [sys.executable, "-c", HEALTHY, str(self.port), *self.signs]


@pytest.fixture
def healthy_pair(tmp_path):
    """A function that returns a `server_pair` whose servers are ready at once, and print lines."""
    with ExitStack() as stack:

        def pair(*signs: str) -> AbstractContextManager[ServerPair]:
            def spec(setup: Setup, role: Role, port: int, environment: dict[str, str]) -> EngineSpec:
                return Healthy(
                    name=str(role), role=role, model="", port=port, environment=environment, signs=signs
                )

            return server_pair(
                SETUP,
                spec_of=spec,
                ports_of=lambda count: [stack.enter_context(reserved_port()) for _ in range(count)],
                folder_of=lambda _: tmp_path / "logs",
            )

        yield pair


def test_interrupt_ends_servers_and_removes_their_logs(healthy_pair, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    started: set[psutil.Process] = set()

    def interrupted() -> None:
        with healthy_pair(WITHOUT_AMX, NIXL_PLUS, BOUND) as pair:
            assert pair.prefill is not None
            started.update(set(psutil.Process().children(recursive=True)) - before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 4  # two servers with a guard each
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not (tmp_path / "logs").exists()


def test_servers_without_the_settings_of_the_benchmark_are_refused(healthy_pair):
    with (
        pytest.raises(TransferError, match="prefill does not say 'benchmarks: NixlConnector"),
        healthy_pair(WITHOUT_AMX),
    ):
        pass


@pytest.mark.parametrize(("connector", "roles"), [("nixl+", ["prefill", "decode"]), ("aggregated", ["both"])])
def test_one_server_has_the_threads_of_two_and_a_pair_has_its_ranks(connector, roles, tmp_path):
    found: list[tuple[str, int, int]] = []

    def spec(setup: Setup, role: Role, port: int, environment: dict[str, str]) -> EngineSpec:
        found.append((str(role), setup.threads, setup.ranks))
        return Script(name=str(role), role=role, model="", port=port, environment=environment, code="")

    pair = server_pair(
        replace(SETUP, connector=connector), ranks=(1, 2), spec_of=spec, folder_of=lambda _: tmp_path
    )
    with pytest.raises(LaunchError), pair:
        pass
    expected = {"prefill": (1, 1), "decode": (1, 2), "both": (2, 1)}
    assert found == [(role, *expected[role]) for role in roles]


def test_server_that_ended_is_named_with_its_last_lines(tmp_path):
    spec = Script(name="decode", role=Role.DECODE, model="", port=1, code="print('I end')")
    with Fleet([spec], tmp_path) as fleet:
        (process,) = fleet.engines
        wait_for(lambda: process.exit_code is not None)
        with pytest.raises(
            TransferError, match=r"(?s)decode ended, because a process of it had ended.*\n  I end"
        ):
            Server(process).settle()
