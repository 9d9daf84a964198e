"""`kvferry router`: its arguments, and how it stops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.serving.router.app import RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.serving.run import run_app
from support.command_line import KVFERRY, run_kvferry
from support.waiting import wait_for

pytestmark = pytest.mark.slow

STREAM = {"prompt": "x", "stream": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decode", "http://127.0.0.1:1"], "the router has no prefill engine"),
        (["--prefill", "http://127.0.0.1:1"], "the router has no decode engine"),
        (["--prefill", "x", "--decode", "y"], "--prefill x is no address"),
        (["--engines-file", "x", "--decode", "y"], "--engines-file is given with"),
        (["--engines-file", "/nothing"], "cannot read engines from /nothing"),
        (["--prefill", "http://[::1", "--decode", "http://y:1"], "--prefill http://[::1 is no address"),
        (["--prefill", "http://x:1", "--decode", "http://y:99999"], "--decode http://y:99999 is no address"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_router_refuses_wrong_engines_in_one_sentence(options, message):
    done = run_kvferry("router", *options)
    assert done.stderr.startswith(f"kvferry: {message}")
    assert (done.stderr.count("\n"), done.returncode) == (1, 2)


def test_port_in_use_is_one_sentence_with_its_holder_and_exit_code_1():
    with listen("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        done = run_kvferry("router", "--prefill", "http://a:1", "--decode", "http://b:1", "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvferry: cannot listen on 127.0.0.1:{port}: Address already in use by ")
    assert f"(process {os.getpid()}); choose another --host or --port" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_router_serves_until_a_signal_and_trusts_kv_transfer_params_with_its_option_only(
    fake, serve_app, kv, number, code
):
    engine, sent = fake(), {"prompt": "x", "kv_transfer_params": {"remote_engine_id": "the front's"}}
    trusts = number == signal.SIGINT
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(engine.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        command += ["--min-prefill-tokens", "0", *["--trust-kv-transfer-params"] * trusts]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            url = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)[1]
            answer = httpx.post(f"{url}/v1/completions", json=sent, trust_env=False)
            process.send_signal(number)
            assert process.wait(60) == code
    assert answer.status_code == 200
    (body,) = [body for body in engine.bodies if body["prompt"] == "x"]
    assert body["kv_transfer_params"] == (sent["kv_transfer_params"] if trusts else kv)


def test_router_introduces_its_engines(fake, serve_app, kv):
    engine = fake()
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(engine.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            wait_for(lambda: engine.raw)
            process.terminate()
    assert engine.bodies[0]["kv_transfer_params"] == kv


def test_router_serves_with_standard_output_closed(fake, serve_app, kv, nobody):
    port = nobody.rpartition(":")[2]
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(fake().app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", port]
        closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        with subprocess.Popen(closed, stderr=subprocess.PIPE, text=True) as process:
            transport = httpx.HTTPTransport(retries=8)
            with httpx.Client(transport=transport, trust_env=False, timeout=60) as client:
                answer = client.post(f"{nobody}/v1/completions", json={"prompt": "x"})
            process.terminate()
            assert (process.wait(60), process.stderr.read()) == (0, "")
    assert answer.status_code == 200


class Running:
    """A router that serves in a thread.

    Attributes:
        stopped: set to drain the router, as the first signal does.
        urgent: set to end the drain, as the second signal does.
    """

    def __init__(self, prefill: str, decode: str, drain_seconds: float) -> None:
        self.stopped, self.urgent = threading.Event(), threading.Event()
        self._app = RouterApp(RouterSettings(prefill=(prefill,), decode=(decode,)))
        self._sock, self._drain_seconds = listen("127.0.0.1", 0), drain_seconds
        self.url = url_of(self._sock)
        self._served = ThreadPoolExecutor(1).submit(self._serve)

    def _serve(self) -> None:
        run_app(
            self._app,
            self._sock,
            lambda: not self.stopped.is_set(),
            self._drain_seconds,
            is_urgent=self.urgent.is_set,
        )

    def error(self) -> BaseException | None:
        """Wait for the end of `run_app`, and return its exception; None if it returned."""
        self.stopped.set()
        return self._served.exception(60)


@pytest.fixture
def router(fake, serve_app, kv):
    """Starts a router in front of a prefill engine and this decode engine."""
    with contextlib.ExitStack() as stack:

        def start(engine, drain_seconds: float) -> tuple[Running, httpx.Client]:
            prefill = stack.enter_context(serve_app(fake(hands_over=kv).app()))
            decode = stack.enter_context(serve_app(engine.app()))
            running = Running(prefill, decode, drain_seconds)
            stack.callback(running.error)
            stack.callback(running.urgent.set)
            return running, stack.enter_context(
                httpx.Client(base_url=running.url, trust_env=False, timeout=60)
            )

        yield start


def begin_drain(running: Running, client: httpx.Client) -> None:
    running.stopped.set()
    wait_for(lambda: client.get("/health").status_code == 503)
    assert client.get("/health").json()["status"] == "draining"


def test_answer_under_way_at_the_end_of_the_drain_ends_with_an_error(router, fake):
    running, client = router(fake(event_seconds=60), 0.5)
    with client.stream("POST", "/v1/completions", json=STREAM) as answer:
        events = answer.iter_text()
        assert "The" in next(events)
        running.stopped.set()
        assert "router_stopped" in "".join(events)
    assert running.error() is None


def test_draining_router_finishes_streams_and_refuses_requests(router, fake):
    engine = fake(event_seconds=60)
    running, client = router(engine, 3600)
    with client.stream("POST", "/v1/completions", json=STREAM) as answer:
        events = answer.iter_text()
        next(events)
        begin_drain(running, client)
        refused = client.post("/v1/completions", json=STREAM)
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "router_draining")
        engine.event_seconds = 0.0
        assert "".join(events).endswith("data: [DONE]\n\n")
    assert running.error() is None


@pytest.mark.parametrize("arrives", [True, False])
def test_draining_router_waits_for_the_rest_of_a_body(arrives, router, fake):
    running, client = router(fake(), 3600 if arrives else 0.5)
    address = client.base_url
    with socket.create_connection((address.host, address.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{")
        wait_for(lambda: "active_requests 1.0" in client.get("/metrics").text)
        if arrives:
            begin_drain(running, client)
            sock.sendall(b'"prompt": "x"}')
        running.stopped.set()
        answer = sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 " if arrives else b"HTTP/1.1 503 ")
    assert (b"router_stopped" in answer) is not arrives


def test_second_signal_ends_a_drain_at_once(router, fake):
    running, client = router(fake(event_seconds=60), 3600)
    with client.stream("POST", "/v1/completions", json=STREAM) as answer:
        events = answer.iter_text()
        next(events)
        begin_drain(running, client)
        running.urgent.set()
        assert "router_stopped" in "".join(events)
    assert isinstance(running.error(), KeyboardInterrupt)
