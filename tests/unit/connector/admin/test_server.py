"""The admin API over real HTTP; the test's thread is the engine's."""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import struct
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager, redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import httpx
import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.admin import AdminCalls, AdminServer
from kvferry.tools.cli.cache import app, ask, read_tokens
from kvferry.transport.security import admin_token, existing_keys
from support.waiting import wait_for

SECRET = "0123456789abcdef0123456789abcdef"


def draining_half():
    """A scheduler half that can only be drained. It remembers the threads that ask for its state."""
    state, threads = {"draining": False, "leases": 1, "loads": 0}, set()

    def drain_state():
        threads.add(threading.current_thread().name)
        return dict(state)

    return SimpleNamespace(
        state=state, threads=threads, drain=lambda: state.update(draining=True), drain_state=drain_state
    )


class Tiers:
    """Tiers of an engine, as far as the API uses them."""

    owed_chunks = 0

    def look_up(self, request):
        assert request.cache_salt == "a"
        return {"host": request.num_tokens - 1}

    def pin(self, name, request):
        return self.pinned

    pinned = 4, 3, 3

    def unpin(self, name):
        return {"p": 2}.get(name, 0)

    def prefetch(self, request):
        return (5, 2) if request.cache_salt == "a" else (0, 0)

    def prefetch_session(self, session):
        return {("a", "s"): (9, 9)}[session]

    def end_session(self, session):
        return {("a", "s"): 3}.get(session, 0)

    def drop_host_memory(self):
        return 7

    def forget_salt(self, salt):
        self.forgotten = salt


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return str(path)


def calls_of(half, tiers=None, wake=lambda: None):
    return AdminCalls(half, tiers, 8, wake)


def start(token, calls, **limits):
    return AdminServer("127.0.0.1", 0, token, calls, poll_seconds=0.01, **limits)


@contextmanager
def serving(secret, tiers=None, *, steps=True, **limits):
    """An engine that is idle until it is woken: (URL, scheduler half, port)."""
    woken, ended, engine = threading.Event(), threading.Event(), draining_half()
    calls = calls_of(engine, tiers, woken.set)

    def run():
        while not ended.is_set():
            if woken.wait(0.05):
                woken.clear()
                calls.run()

    thread = threading.Thread(target=run, name="engine")
    if steps:
        thread.start()
    token = admin_token(existing_keys(secret))
    server = start(token, calls, **limits)
    try:
        yield f"http://127.0.0.1:{server.port}", engine, server.port
    finally:
        server.close()
        ended.set()
        if steps:
            thread.join()


def post(port, path, body=b"{}", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_calls_are_executed_in_the_engines_thread(secret):
    with serving(secret) as (url, engine, _):
        assert not ask(url, secret, "status", {})["draining"]
        found = ask(url, secret, "drain", {})
        assert (found["draining"], found["drained"], found["leases"]) == (True, False, 1)
        engine.state["leases"] = 0
        assert ask(url, secret, "status", {})["drained"]
        assert engine.threads == {"engine"}


def test_tiers_are_looked_up_pinned_and_dropped(secret):
    tiers = Tiers()
    with serving(secret, tiers) as (url, _, _):
        prompt = {"tokens": [1, 2, 3], "salt": "a"}
        assert ask(url, secret, "lookup", prompt) == {"tokens": 3, "tiers": {"host": 2}}
        assert ask(url, secret, "pin", {**prompt, "name": "p"}) == {
            "chunks": 4,
            "host_chunks": 3,
            "pinned_chunks": 3,
        }
        assert ask(url, secret, "unpin", {"name": "p"}) == {"unpinned_chunks": 2}
        assert ask(url, secret, "drop", {}) == {"dropped_chunks": 7}
        ask(url, secret, "drop", {"salt": "a"})
        assert tiers.forgotten == "a"


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {SECRET}"}])
def test_a_client_without_the_token_is_refused_before_its_body_is_read(secret, given):
    with serving(secret) as (_, engine, port):
        status, _ = post(port, "/v1/drain", **{**given, "Content-Length": "1000000000"})
        assert (status, engine.state["draining"]) == (401, False)


def test_the_token_is_in_no_log_and_no_answer(secret, caplog):
    caplog.set_level(logging.DEBUG)
    token = admin_token(existing_keys(secret))
    with serving(secret) as (_, _, port):
        _, answer = post(port, "/v1/none", Authorization=f"Bearer {token}")
        assert answer == {"error": "there is no such call"}
        post(port, f"/v1/{token}", Authorization="Bearer wrong")
    assert token not in caplog.text


@pytest.mark.parametrize(
    ("call", "body", "said"),
    [
        ("lookup", {"tokens": [1]}, "no tiers"),
        ("lookup", {"tokens": ["a"]}, "does not fit"),
        ("lookup", {"tokens": [1], "model": "x"}, "does not fit"),
        ("unknown", {}, "no such call"),
    ],
)
def test_an_invalid_call_is_an_error(secret, call, body, said):
    with serving(secret) as (url, _, _), pytest.raises(ConfigError, match=said):
        ask(url, secret, call, body)


@pytest.mark.parametrize("tokens", [[], [1] * 9])
def test_a_prompt_is_no_longer_than_the_engines(secret, tokens):
    with serving(secret, Tiers()) as (url, _, _), pytest.raises(ConfigError, match="1 to 8"):
        ask(url, secret, "lookup", {"tokens": tokens})


def test_a_call_fails_if_the_engine_runs_no_step(secret):
    with serving(secret, steps=False, step_seconds=0.05) as (url, engine, _):
        with pytest.raises(ConfigError, match="no engine step"):
            ask(url, secret, "drain", {})
        assert not engine.state["draining"]


def test_a_call_is_not_executed_after_its_timeout():
    calls, done = calls_of(draining_half()), []
    with pytest.raises(TimeoutError):
        calls.execute(lambda: done.append(1), 0.01)
    calls.run()
    assert (done, len(calls)) == ([], 0)


def test_a_large_body_is_refused(secret):
    token = admin_token(existing_keys(secret))
    with serving(secret) as (_, _, port):
        headers = {"Authorization": f"Bearer {token}", "Content-Length": str((16 << 20) + 1)}
        assert post(port, "/v1/lookup", b"", **headers)[0] == 400


def test_a_length_of_thousands_of_digits_is_refused(secret):
    token = admin_token(existing_keys(secret))
    with serving(secret) as (_, _, port):
        headers = {"Authorization": f"Bearer {token}", "Content-Length": "9" * 5000}
        assert post(port, "/v1/lookup", b"", **headers)[0] == 400


@pytest.mark.parametrize(("call", "status"), [("status", 200), ("drain", 405), ("drop", 405)])
def test_only_status_is_read_with_get(secret, call, status):
    with serving(secret, Tiers()) as (_, engine, port):
        given = {"Authorization": f"Bearer {admin_token(existing_keys(secret))}"}
        assert httpx.get(f"http://127.0.0.1:{port}/v1/{call}", headers=given).status_code == status
        assert not engine.state["draining"]


def test_a_stranger_that_sends_slowly_delays_another_client_by_seconds(secret):
    with (
        serving(secret, request_seconds=0.2) as (url, _, port),
        socket.create_connection(("127.0.0.1", port)) as stranger,
    ):
        stranger.sendall(b"POST /v1/status HTTP/1.1\r\n")
        answered = threading.Event()

        def send_slowly() -> None:
            with suppress(OSError):
                while not answered.wait(0.05):
                    stranger.sendall(b"a")

        sending = threading.Thread(target=send_slowly)
        sending.start()
        try:
            assert "leases" in ask(url, secret, "status", {})
        finally:
            answered.set()
            sending.join()


def test_a_call_ends_without_an_error_if_its_client_disconnects(secret, caplog):
    token, done = admin_token(existing_keys(secret)), threading.Event()
    engine = draining_half()
    engine.drain, calls = done.set, calls_of(engine)
    server = start(token, calls)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /v1/drain HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n"
        client.sendall(head.encode() + b"{}")
        wait_for(lambda: len(calls) == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    calls.run()
    assert done.is_set()
    server.close()
    assert not caplog.text


def test_tokens_are_a_json_list(tmp_path):
    (path := tmp_path / "tokens").write_text("[1, 2]")
    assert read_tokens(str(path)) == [1, 2]
    path.write_text('"text"')
    with pytest.raises(ConfigError, match="JSON list"):
        read_tokens(str(path))


def test_tokens_are_what_vllms_tokenize_answers(tmp_path):
    (path := tmp_path / "tokens").write_text('{"count": 2, "max_model_len": 4096, "tokens": [1, 2]}')
    assert read_tokens(str(path)) == [1, 2]
    path.write_text('{"error": {"message": "no"}}')
    with pytest.raises(ConfigError, match=r"POST /tokenize"):
        read_tokens(str(path))


@pytest.mark.parametrize("answer", ['{"detail": "Not Found"}', '{"error": {"message": "Not Found"}}'])
def test_an_openai_endpoint_is_not_taken_for_an_admin_api(secret, answer):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(404)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        with pytest.raises(ConfigError, match=r"is not an admin API \(status 404\); give the host and port"):
            ask(f"http://127.0.0.1:{server.server_port}", secret, "status", {})
        server.shutdown()


def run_cache(*arguments):
    with redirect_stdout(io.StringIO()) as out:
        return app(arguments, standalone_mode=False) or 0, out.getvalue().strip()


@pytest.mark.parametrize(
    ("pinned", "code", "text"),
    [
        ((10, 6, 6), 0, "pinned: 6 chunks, those of the prompt's 10 that are in host memory"),
        ((10, 6, 4), 0, "pinned: 4 of 6 chunks in host memory; pins hold at most half of it"),
        (
            (10, 0, 0),
            1,
            "host memory has none of the prompt's 10 chunks; send the engine the prompt first",
        ),
    ],
)
def test_a_pin_says_why_chunks_of_the_prompt_are_not_pinned(secret, tmp_path, pinned, code, text):
    (tokens := tmp_path / "tokens").write_text("[1, 2]")
    tiers = Tiers()
    tiers.pinned = pinned
    with serving(secret, tiers) as (url, _, _):
        arguments = ["--engine", url, "--secret-file", secret, "--name", "p", "--tokens", str(tokens)]
        assert run_cache("pin", *arguments) == (code, text)


def test_an_unknown_pin_is_an_error(secret):
    with serving(secret, Tiers()) as (url, _, _):
        at = ["pin", "--engine", url, "--secret-file", secret, "--name"]
        assert run_cache(*at, "p") == (0, "no longer pinned: 2 chunks")
        assert run_cache(*at, "q") == (1, "no pin is named q")


def test_a_prompt_or_a_session_is_prefetched_and_a_session_ended(secret, tmp_path):
    (tokens := tmp_path / "tokens").write_text("[1, 2]")
    with serving(secret, Tiers()) as (url, _, _):
        at = ["--engine", url, "--secret-file", secret]
        assert run_cache("prefetch", *at, "--tokens", str(tokens), "--salt", "a") == (
            0,
            "5 chunks: 2 in host memory, 3 to be read",
        )
        assert run_cache("prefetch", *at, "--tokens", str(tokens)) == (
            1,
            "No tier has a prefix of it that can be loaded.",
        )
        session = ["--session", "s", "--salt", "a"]
        assert run_cache("prefetch", *at, *session)[1] == "9 chunks: 9 in host memory, 0 to be read"
        assert run_cache("end-session", *at, *session) == (0, "3 chunks will be evicted first")
        assert run_cache("end-session", *at, "--session", "s") == (1, "0 chunks will be evicted first")
        with pytest.raises(ConfigError, match="either tokens or a session"):
            run_cache("prefetch", *at)


def test_an_address_in_use_is_an_error(secret):
    with serving(secret) as (_, _, port), pytest.raises(ConfigError, match=r"admin\.port"):
        AdminServer("127.0.0.1", port, "t", calls_of(draining_half()))


@pytest.mark.slow
def test_a_client_that_sends_slowly_does_not_hold_up_the_end_of_the_engine(secret):
    token = admin_token(existing_keys(secret))
    server = start(token, calls_of(draining_half()))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/status HTTP/1.1\r\n")
        wait_for(lambda: server._server._client is not None)
        ending = threading.Thread(target=server.close)
        ending.start()

        def sent_more() -> bool:
            with suppress(OSError):
                client.sendall(b"a")
            return not ending.is_alive()

        wait_for(sent_more)
        ending.join()


@pytest.mark.slow
def test_a_call_that_waits_when_the_engine_stops_is_not_executed():
    calls, done = calls_of(draining_half()), []
    failed = []

    def wait() -> None:
        try:
            calls.execute(lambda: done.append(1), 60)
        except CancelledError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: len(calls) == 1)
    calls.close()
    waiting.join()
    calls.run()
    assert failed
    assert not done
    with pytest.raises(CancelledError):
        calls.execute(lambda: done.append(1), 60)
