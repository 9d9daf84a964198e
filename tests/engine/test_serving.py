"""`kvferry serve` with real engines, as a person uses it."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from kvferry.common.units import format_bytes
from kvferry.observe.metrics import COMMON, CONNECTOR, EXPOSED
from kvferry.tools.serving.router.backends import StreamSource, new_ticket
from kvferry.tools.serving.router.bodies import prefill_body, withdrawal_body
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import engine_client
from support.cut import Cutter, in_event
from support.explain import explain
from support.odd_requests import FAILS_IN_VLLM, odd_requests
from support.otlp import Collector, attributes
from support.terminal import Terminal
from support.token_engine import session_for
from support.vllm_engine import copied
from support.vllm_engine.plugins import with_plugins
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

KVFERRY = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()"]
ENGINE = ["--enforce-eager", "--dtype=float32", "--max-model-len=1024", f"--kv-cache-memory-bytes={64 << 20}"]
TEXT = "The quick brown fox jumps over the lazy dog, and then it does it once more because it can. "

_COMPLETED = "vllm:request_success_total"
GRANTED = "kvferry_leases_granted_total"
REPORTED = "vllm:prompt_tokens_cached_total"
TRANSFERRED = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}'


def environment() -> dict[str, str]:
    """Of engines: fixtures add to it."""
    return {**os.environ, "TORCH_COMPILE_DISABLE": "1"}


def processes_below(root: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    below = {root}
    while grown := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= grown
    return below - {root}


def shared_memory_of(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            found |= {*re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text())}
    return found


class Served:
    """A running `kvferry serve`, with what belongs to it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = str(model)
        self.errors = folder / "stderr"
        self.collector = Collector()
        command = [*KVFERRY, "serve", self.model, "--port", "0", "--log-dir", str(folder)]
        command += ["--turn-seconds", "600", "--", *ENGINE, "--otlp-traces-endpoint", self.collector.url]
        command += ["--enable-prompt-tokens-details"]
        soon = environment() | with_plugins(folder / "plugins", copied) | {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        soon["VLLM_SERVER_DEV_MODE"] = "1"  # for /pause
        soon["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=soon, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)
        assert found, self.errors.read_text()
        self.url = found[1]
        self.client = engine_client(120)
        health = self.client.get(f"{self.url}/health").json()
        self.prefill, self.decode = health["prefill"][0]["url"], health["decode"][0]["url"]

    def post(self, url: str, path: str, **body) -> httpx.Response:
        body = {"model": self.model, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
        return self.client.post(url + path, json=body)

    def metric(self, url: str, name: str) -> float:
        text = self.client.get(f"{url}/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def expired(self, url: str) -> float:
        """Number of leases that have expired."""
        text = self.client.get(f"{url}/metrics").text
        found = re.findall(r'^kvferry_leases_ended_total{.*outcome="expired".*} (\S+)$', text, re.MULTILINE)
        return sum(map(float, found))

    def misses(self, url: str) -> dict[str, float]:
        """By reason."""
        found = re.findall(
            r'^kvferry_misses_total{.*reason="(\w+)".*} (\S+)$',
            self.client.get(f"{url}/metrics").text,
            re.MULTILINE,
        )
        return {reason: sum(float(n) for its, n in found if its == reason) for reason, _ in found}

    def waits(self) -> int:
        """Number of times that the engines' own threads have waited for something."""
        engines = [psutil.Process(pid) for pid in processes_below(self.process.pid)]
        return sum(one.num_ctx_switches().voluntary for one in engines if "EngineCor" in one.name())

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()
        self.collector.close()


@pytest.fixture(scope="module")
def model(checkpoints):
    return tiny_checkpoint("qwen3", checkpoints)


@pytest.fixture(scope="module")
def served(running, model, tmp_path_factory):
    running.close()
    served = Served(model, tmp_path_factory.mktemp("served"))
    yield served
    served.close()


def test_the_decode_engine_has_met_the_prefill_engine_before_any_request(served):
    log = served.errors.parent / "decode-0.log"
    wait_for(lambda: re.search(r"peer \S+ .* at 127\.0\.0\.1:\d+: 1 rank known", log.read_text()))


def test_completion_equals_a_single_engines_and_its_kv_is_transferred(served):
    prompt = TEXT * 20
    before = served.metric(served.decode, "vllm:external_prefix_cache_hits_total")
    answer = served.post(served.url, "/v1/completions", prompt=prompt, logprobs=1).json()
    alone = served.post(served.prefill, "/v1/completions", prompt=prompt, logprobs=1, cache_salt="a").json()
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    assert answer["choices"][0]["logprobs"]["tokens"] == alone["choices"][0]["logprobs"]["tokens"]
    assert answer["usage"] == alone["usage"]
    moved = served.metric(served.decode, "vllm:external_prefix_cache_hits_total") - before
    assert moved >= answer["usage"]["prompt_tokens"] - 1 > 300


def test_a_request_is_explained_and_its_spans_belong_to_the_callers_trace(served):
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    headers = {"X-Request-Id": "who-asks-why", "traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-01"}
    body = {"model": served.model, "prompt": "Why? " + TEXT * 18, "max_tokens": 4}
    answer = served.client.post(f"{served.url}/v1/completions", json=body, headers=headers).json()
    tokens = answer["usage"]["prompt_tokens"]
    wait_for(lambda: "released" in explain("who-asks-why").stdout)

    prefill, decode = explain("who-asks-why").stdout.split("\n\n")
    assert re.match(r"cmpl-who-asks-why-0-\w{8}\n  prefill engine, process \d+,\s", prefill)
    assert f"{tokens - 1} tokens are offered to another engine" in prefill
    assert re.match(r"cmpl-who-asks-why-0-\w{8}\n  decode engine, process \d+,\s", decode)
    assert f"The request has {tokens} tokens. Possible sources: peer." in decode
    assert f"Scheduled: {tokens - 1} tokens cached, 1 to compute." in decode
    assert explain(answer["id"]).stdout == f"{prefill}\n\n{decode}"
    listed = explain("--last", "3").stdout.splitlines()
    at = listed.index(decode.splitlines()[0])
    assert f"{tokens} tokens: {tokens - 1} from peer, 1 computed" in " ".join(
        "".join(listed[at + 1 : at + 3]).split()
    )

    spans = served.collector.of(trace_id, "llm_request", "kvferry.load", "kvferry.lease")
    load, lease = attributes(spans["kvferry.load"]), attributes(spans["kvferry.lease"])
    assert {spans[name].parent_span_id for name in ("kvferry.load", "kvferry.lease")} == {span_id}
    assert load["gen_ai.request.id"] == lease["gen_ai.request.id"] == answer["id"] + "-0"
    assert (load["kvferry.outcome"], load["kvferry.tokens.peer"]) == ("ready", tokens - 1)
    assert (lease["kvferry.tokens"], lease["kvferry.expired"]) == (tokens - 1, False)
    assert f"{format_bytes(load['kvferry.bytes'])} of 0 full_attention" in decode
    assert 0 < time.time_ns() - spans["kvferry.load"].end_time_unix_nano < 120e9
    assert (
        0
        < load["kvferry.read_seconds"] * 1e9
        < lasted(spans["kvferry.load"])
        < lasted(spans["kvferry.lease"])
    )


def lasted(span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


def test_unknown_request_is_explained_in_one_sentence(served):
    done = explain("nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"kvferry: no request 'nobody' is remembered by 2 engines .*\n", done.stderr)


def test_chat_equals_a_single_engines(served):
    messages = [{"role": "user", "content": TEXT * 10}]
    answer = served.post(served.url, "/v1/chat/completions", messages=messages).json()
    alone = served.post(served.prefill, "/v1/chat/completions", messages=messages, cache_salt="b").json()
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]


def test_the_next_turn_of_a_chat_is_read_from_the_engine_that_gave_the_last_answer(served):
    text = {"model": served.model, "prompt": TEXT, "return_token_strs": True}
    told = served.client.post(f"{served.url}/tokenize", json=text).json()
    # Each with the space before it: in the next prompt these are the same tokens again.
    words = [
        token for token, said in zip(told["tokens"], told["token_strs"], strict=True) if said[0] == "\u0120"
    ]
    numbers = itertools.count()

    def is_read() -> bool:
        """In a new conversation; who is asked may have been silent for too long."""
        name = f"and-then-{next(numbers)}"
        first = {"role": "user", "content": f"{name} {TEXT * 18}"}
        before = chat(served, [first], max_tokens=70, allowed_token_ids=words)
        last = {"role": "assistant", "content": before["choices"][0]["message"]["content"].strip()}
        messages = [first, last, {"role": "user", "content": "And then?"}]
        hit_tokens = served.metric(served.prefill, "kvferry_hit_tokens_total")
        answer = chat(served, messages, name)
        alone = served.post(served.decode, "/v1/chat/completions", messages=messages, cache_salt=name).json()
        assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
        wait_for(lambda: "released" in explain(name).stdout)
        loaded = re.search(
            r"Loading tokens (\d+) to (\d+): \d+ from peer", explain(name).stdout.split("\n\n")[0]
        )
        if loaded is None:
            return False
        start, end = int(loaded[1]), int(loaded[2]) + 1
        assert start <= before["usage"]["prompt_tokens"]
        assert end == before["usage"]["total_tokens"] - 1, "the last token's content was never computed"
        hit_tokens += end - start
        wait_for(lambda: served.metric(served.prefill, "kvferry_hit_tokens_total") == hit_tokens)
        return True

    wait_for(is_read)


def chat(served, messages, name="chat", **more) -> dict:
    """An answer of the router."""
    body = {
        "model": served.model,
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"X-Request-Id": name}
    url = f"{served.url}/v1/chat/completions"
    return served.client.post(url, json={**body, **more}, headers=headers).json()


def streamed(answer: httpx.Response) -> tuple[str, dict]:
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]


def test_stream_adds_up_to_a_single_engines_answer(served):
    body = {"prompt": TEXT * 15 + "Now", "stream": True, "stream_options": {"include_usage": True}}
    answer = streamed(served.post(served.url, "/v1/completions", **body, cache_salt="b"))
    assert answer == streamed(served.post(served.prefill, "/v1/completions", **body, cache_salt="c"))
    assert answer[1]["completion_tokens"] == 12
    assert answer[1]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 12}),
    ],
    ids=["completions", "chat", "messages", "responses"],
)
def test_usage_of_a_prompt_that_nobody_has_seen_is_a_single_engines(served, path, prompt):
    usage, alone = (
        served.post(url, path, **prompt(f"{number} of {path}: {TEXT * 18}")).json()["usage"]
        for url, number in ((served.url, 1), (served.prefill, 2))
    )
    assert usage == alone


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_usage_of_a_stream_is_what_the_prefill_engine_had_in_its_caches(served, path):
    counting = {} if path == "/v1/messages" else {"stream_options": {"include_usage": True}}

    def usages(url: str, number: int) -> list[dict]:
        """Of the events of a stream, after the prefill engine has computed the beginning of the prompt."""
        known = f"{number} of {path}, streamed: {TEXT * 10}"
        served.post(served.prefill, path, messages=[{"role": "user", "content": known}])
        asked = [{"role": "user", "content": known + TEXT * 8}]
        answer = served.post(url, path, messages=asked, stream=True, **counting)
        events = [json.loads(line) for line in re.findall(r"^data: ({.*})$", answer.text, re.MULTILINE)]
        told = [event.get("usage") or event.get("message", {}).get("usage") for event in events]
        return [usage for usage in told if usage]

    found = usages(served.url, 1)
    assert found == usages(served.prefill, 2)
    details = found[-1] if path == "/v1/messages" else found[-1]["prompt_tokens_details"]
    assert details.get("cache_read_input_tokens") or details.get("cached_tokens")


def test_vllm_keeps_a_response_under_the_id_that_the_router_chose(served):
    path, ask = "/v1/responses", {"input": TEXT, "max_output_tokens": 4}
    whole = served.post(served.url, path, **ask).json()["id"]
    events = served.post(served.url, path, **ask, stream=True).text.splitlines()
    first = next(line for line in events if line.startswith("data: "))
    streamed = json.loads(first.removeprefix("data: "))["response"]["id"]
    background = served.post(served.url, path, **ask, background=True).json()["id"]
    for name in (whole, streamed, background):
        assert re.fullmatch("resp_[0-9a-f]{40}", name)
        url = f"{served.url}{path}/{name}"
        wait_for(lambda url=url: served.client.get(url).json()["status"] in ("completed", "incomplete"))
        again = served.post(served.url, path, **ask, previous_response_id=name).json()
        assert again["previous_response_id"] == name
        assert served.client.post(f"{url}/cancel").status_code == 400


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "both at once"])
def test_usage_is_what_the_prefill_engine_had_in_its_caches(served, at_once, samples):
    path, known = "/v1/completions", f"{at_once} {samples}: " + TEXT * 10

    def ask(prompt: str, ticket: str | None = None) -> dict:
        body = json.loads(prefill_body({"model": served.model, "prompt": prompt}, ticket))
        return served.post(served.prefill, path, **body).json()

    def answer(prompt: str, offer: dict, **more) -> dict:
        return served.post(served.decode, path, prompt=prompt, kv_transfer_params=offer, **more).json()

    def counts() -> list[float]:
        return [served.metric(served.decode, name) for name in (TRANSFERRED, REPORTED)]

    served.post(served.prefill, path, prompt=known)
    answer("Hello", earlier := ask("Hello")["kv_transfer_params"])
    before, text, ticket = counts(), known + TEXT * 8, new_ticket()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, text, ticket if at_once else None)
        offer = StreamSource.of(earlier).offer(ticket) if at_once else asked.result()["kv_transfer_params"]
        usage = answer(text, offer, n=samples, temperature=1.0)["usage"]
        cached = asked.result()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached == usage["prompt_tokens_details"]["cached_tokens"]
    transferred, reported = (now - was for now, was in zip(counts(), before, strict=True))
    assert reported == samples * cached
    assert transferred >= usage["prompt_tokens"] - 1 > cached


@pytest.mark.parametrize(
    "more",
    [
        {"n": 3, "temperature": 1.0},
        {"prompt": [TEXT, TEXT * 3]},
        {"max_tokens": 1},
        {"echo": True, "logprobs": 1},
        {"logprob_token_ids": [1, 2], "logprobs": 2},
        {"truncate_prompt_tokens": 40},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_requests_of_other_shapes_are_answered(served, more):
    answer = served.post(served.url, "/v1/completions", **{"prompt": TEXT * 5, "max_tokens": 4, **more})
    assert answer.status_code == 200
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}


def test_parallel_samples_equal_a_single_engines_and_leave_no_lease(served):
    body = {"prompt": "Samples: " + TEXT * 18, "n": 3, "seed": 7, "temperature": 1.0}
    granted = served.metric(served.prefill, GRANTED)
    answer = served.post(served.url, "/v1/completions", **body).json()
    alone = served.post(served.prefill, "/v1/completions", **body, cache_salt="n").json()
    assert [one["text"] for one in answer["choices"]] == [one["text"] for one in alone["choices"]]
    # Well before the leases expire.
    wait_for(lambda: served.metric(served.prefill, "vllm:kv_cache_usage_perc") == 0)
    assert served.metric(served.prefill, GRANTED) == granted + 1


def test_a_prompts_logprobs_from_a_prefill_engine_are_whole_and_nothing_is_offered(served):
    body = {"prompt": TEXT * 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = served.post(served.prefill, "/v1/completions", **body, kv_transfer_params=asked)
    alone = served.post(served.decode, "/v1/completions", **body, cache_salt="echo")
    assert answer.status_code == 200
    assert answer.json()["choices"] == alone.json()["choices"]
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"] is False


def test_errors_of_an_engine_reach_the_caller(served):
    answer = served.post(served.url, "/v1/completions", prompt=TEXT, model="nobody")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
    answer = served.post(served.url, "/v1/completions", prompt=TEXT * 200)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")


def test_disconnected_client_frees_the_decode_engine(served):
    raw = json.dumps({"model": served.model, "prompt": TEXT, "max_tokens": 900, "ignore_eos": True}).encode()
    address = urlsplit(served.url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    completed = served.metric(served.decode, _COMPLETED)
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(head.encode() + raw)
        wait_for(lambda: served.metric(served.decode, "vllm:num_requests_running") == 1)
    wait_for(lambda: served.metric(served.decode, "vllm:num_requests_running") == 0)
    assert served.metric(served.decode, _COMPLETED) == completed


def test_a_pause_does_not_wait_for_a_ticket_that_nobody_claims(served):
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    expired = served.expired(served.prefill)
    answer = served.post(
        served.prefill, "/v1/completions", prompt="Nobody: " + TEXT, kv_transfer_params=asked
    )
    assert answer.json()["kv_transfer_params"]["do_remote_prefill"]
    assert served.client.post(f"{served.prefill}/pause?mode=wait").status_code == 200
    assert served.client.post(f"{served.prefill}/resume").status_code == 200
    wait_for(lambda: served.metric(served.prefill, "vllm:kv_cache_usage_perc") == 0)
    assert served.expired(served.prefill) == expired


def test_an_engine_that_sleeps_ends_its_leases_and_hands_over_again_when_it_is_awake(served):
    asked, path = {"do_remote_decode": True, "do_remote_prefill": False}, "/v1/completions"
    early, later = "Sleeper: " + TEXT, "Awake: " + TEXT
    offer = served.post(served.prefill, path, prompt=early, kv_transfer_params=asked).json()
    assert served.client.post(f"{served.prefill}/sleep").status_code == 200
    refused = served.misses(served.decode).get("refused", 0)
    params = offer["kv_transfer_params"]
    del params["remote_sealed_grant"]  # with it, the read may begin before the claim is refused
    assert served.post(served.decode, path, prompt=early, kv_transfer_params=params).status_code == 200
    assert served.misses(served.decode)["refused"] == refused + 1
    assert served.client.post(f"{served.prefill}/wake_up").json()["status"] == "awake"
    loaded = served.metric(served.decode, TRANSFERRED)
    answer = served.post(served.url, path, prompt=later)
    assert served.metric(served.decode, TRANSFERRED) > loaded
    assert answer.json()["choices"] == served.post(served.decode, path, prompt=later).json()["choices"]


def test_an_idle_prefill_engine_frees_the_kv_that_its_router_no_longer_wants(served):
    body = {"model": served.model, "prompt": "Unwanted: " + TEXT}
    granted, expired = served.metric(served.prefill, GRANTED), served.expired(served.prefill)
    name, path = new_ticket(), "/v1/completions"
    served.post(served.prefill, path, **json.loads(prefill_body(body, name=name)))
    assert served.metric(served.prefill, GRANTED) == granted + 1
    before = served.waits()
    time.sleep(0.5)
    assert served.waits() < before + 50, "it runs steps, although they can do nothing for the lease"
    served.post(served.prefill, path, **json.loads(withdrawal_body(served.model, [name])))
    wait_for(lambda: served.metric(served.prefill, "vllm:kv_cache_usage_perc") == 0)
    assert served.expired(served.prefill) == expired


def test_doctor_finds_both_engines_behind_the_router_and_lets_them_read(served):
    command = [*KVFERRY, "doctor", "--no-machine", "--json", f"{served.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = {one["title"]: one["findings"] for one in json.loads(done.stdout)["sections"]}
    for role, url in (("prefill", served.prefill), ("decode", served.decode)):
        said = {one["subject"]: one["found"] for one in sections[f"{role} engine {url}"]}
        assert said["metrics"] == "/metrics has kvferry's metrics"
        assert "weights " in said["content"]
    (pair,) = [findings for title, findings in sections.items() if "->" in title]
    assert f"{served.prefill} (there) -> {served.decode} (here)" in sections
    assert "1 rank there, 1 here" in next(one["found"] for one in pair if one["subject"] == "compatible")
    wait_for(lambda: served.metric(served.prefill, "vllm:kv_cache_usage_perc") == 0)


def test_top_finds_the_engines_through_the_router_and_shows_what_they_have_done(served):
    both = served.prefill, served.decode
    rows = [
        rf"^{re.escape(urlsplit(url).netloc)} {role} +0 +0 "
        for url, role in ((served.prefill, "prefill"), (served.decode, "decode"))
    ]
    with Terminal([*KVFERRY, "top", served.url, "--interval", "0.5"]) as terminal:
        terminal.until(lambda text: "engines answering: 2 of 2" in text and "tokens/s  answers" in text)
        with asking(served):  # tokens per second, just now
            terminal.until(lambda text: re.search(r"peer [1-9]", text) is not None)

        def as_the_pages_have_it(text: str) -> bool:
            """Engines' last steps are on their pages a moment later."""
            # The decode engine too has: for next turns, and to whoever examined it.
            granted = sum(served.metric(url, GRANTED) for url in both)
            hits = sum(served.metric(url, "kvferry_hits_total") for url in both)
            # Parallel samples find the prompt in the engine's own cache: nothing was asked of a source.
            misses = [one for url in both for one in served.misses(url).items()]
            asked = hits + sum(n for reason, n in misses if reason != "local")
            source = "".join(line for line in text.splitlines() if line.startswith("peer "))
            return (
                min(granted, hits) >= 3
                and f" {granted:.0f} granted" in text
                and f" {hits / asked:.0%} " in source
                and all(re.search(row, text, re.MULTILINE) for row in rows)
            )

        said = terminal.until(as_the_pages_have_it)
        assert f"all engines: {served.model}"[:60] in said
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.modes == terminal.before


@contextmanager
def asking(served: Served) -> Iterator[None]:
    """New prompts, one after the other, for as long as the block runs; three of them at least."""
    ended = threading.Event()

    def ask() -> None:
        for number in itertools.count():
            if number >= 3 and ended.is_set():
                return
            served.post(served.url, "/v1/completions", prompt=f"{number} {TEXT * 12}")

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        yield
    finally:
        ended.set()
        asker.join()


VICTIM = {"X-Request-Id": "victim", "Content-Type": "application/json"}


def wrong_answers(served: Served, texts: list[str], alone: list[dict], ended: threading.Event) -> list[str]:
    """Answers to another user through the router that are not a single engine's, until told to end."""
    wrong = []
    for text, right in itertools.cycle(zip(texts, alone, strict=True)):
        if ended.is_set():
            break
        body = {"model": served.model, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = served.client.post(f"{served.url}/v1/completions", json=body, headers=VICTIM)
        if answer.status_code != 200 or answer.json()["choices"] != right["choices"]:
            wrong.append(answer.text)
    return wrong


def attack(served: Served, url: str, offer: dict) -> dict[str, int]:
    """Send an engine all odd requests, one after the other; the status of each."""
    plain = json.dumps({"model": served.model, "prompt": TEXT * 6, "max_tokens": 2})[:-1].encode()
    statuses = {}
    for name, raw in odd_requests(offer):
        headers = {"Content-Type": "application/json"} if "id" in name.split() else VICTIM
        answer = served.client.post(f"{url}/v1/completions", content=plain + b"," + raw[1:], headers=headers)
        statuses[name] = answer.status_code
        assert answer.elapsed.total_seconds() < 30, name
    return statuses


@pytest.mark.long
def test_malformed_requests_do_not_affect_other_clients(served):
    """Sent to the engines themselves, under the request id of another user, who is asking all the while."""
    texts, both = [f"{number} {TEXT * 6}" for number in range(4)], (served.prefill, served.decode)
    alone = [
        served.post(served.prefill, "/v1/completions", prompt=text, cache_salt="o").json() for text in texts
    ]
    asked = {"prompt": TEXT * 6, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}
    offer = served.post(served.prefill, "/v1/completions", **asked).json()["kv_transfer_params"]
    refused, ended = served.misses(served.decode).get("refused", 0), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        users = [pool.submit(wrong_answers, served, texts, alone, ended) for _ in range(2)]
        attackers = [pool.submit(attack, served, url, offer) for url in both]
        wait(attackers)
        ended.set()
        assert [user.result() for user in users] == [[], []]
    for attacker in attackers:
        statuses = attacker.result()
        assert {name for name, status in statuses.items() if status == 500} == FAILS_IN_VLLM
        assert {*statuses.values()} <= {200, 400, 404, 422, 500}
        assert list(statuses.values()).count(200) > len(statuses) / 2, "served, by computing"
    assert served.misses(served.decode)["refused"] > refused + 50
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvferry_pending_loads"):
        wait_for(lambda name=name: [served.metric(url, name) for url in both] == [0, 0])
    wait_for(lambda: served.metric(served.prefill, "kvferry_leases") == 0)
    assert served.metric(served.prefill, "vllm:kv_cache_usage_perc") == 0
    assert served.client.get(f"{served.url}/health").json()["status"] == "ok"
    log = (served.errors.parent / "decode-0.log").read_bytes()
    assert 0 < max(len(line) for line in log.splitlines() if b"is not served by" in line) < 4000


def test_ticket_is_refused_for_another_prompt_a_second_time_and_if_made_up(served):
    """Sent to the decode engine itself; whatever comes of it, the victims' answers are right afterwards."""
    texts = [f"{name}: {TEXT * 8}" for name in ("mine", "victim", "other")]
    alone = [
        served.post(served.prefill, "/v1/completions", prompt=text, cache_salt="t").json()["choices"]
        for text in texts
    ]

    def ticket_for(text: str, **body) -> dict:
        asked = {"prompt": text, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **body}
        return served.post(served.prefill, "/v1/completions", **asked).json()["kv_transfer_params"]

    def answer(number: int, offer: dict | None, **body) -> None:
        asked = {"prompt": texts[number], **body} | ({"kv_transfer_params": offer} if offer else {})
        given = served.post(served.decode, "/v1/completions", **asked).json()["choices"]
        assert [one["text"] for one in given] == [one["text"] for one in alone[number]]

    def refused(*other: str) -> float:
        misses = served.misses(served.decode)
        return sum(misses.get(reason, 0) for reason in ("refused", *other))

    mine, victims = ticket_for(texts[0]), ticket_for(texts[1])
    before, in_vain = refused(), refused("looking", "gone")
    old = {"remote_block_ids": [[1, 2, 3, 4]], "remote_lease": {"slot": 0, "generation": 0, "incarnation": 1}}
    attempts = (
        (1, mine),  # another user's prompt, with a ticket of one's own
        (0, victims),  # a ticket that was stolen
        (2, {**mine, "remote_request_id": secrets.token_hex(16)}),
        (2, {**mine, **old}),
        (2, {**victims, "remote_num_tokens": 17}),
        (2, {**mine, "remote_port": urlsplit(served.url).port}),
    )
    thieves = [f"thief {attempt}" for attempt in range(len(attempts))]  # none has anything of it already
    for (number, offer), thief in zip(attempts, thieves, strict=True):
        answer(number, offer, cache_salt=thief)
    # At the last address something else listens, and does not answer.
    assert refused("looking", "gone") == in_vain + 6
    assert refused() >= before + 5
    assert served.metric(served.prefill, "kvferry_leases") >= 2, "a redemption that failed ends no lease"
    moved = served.metric(served.decode, "vllm:external_prefix_cache_hits_total")
    for number, offer in ((0, mine), (1, victims)):
        answer(number, offer)
    assert served.metric(served.decode, "vllm:external_prefix_cache_hits_total") > moved + 200, "still theirs"
    before = refused()
    for number, offer in ((0, mine), (1, victims)):  # once more, after their leases have ended
        answer(number, offer, cache_salt="again")
    salted = ticket_for(texts[2], cache_salt="tenant")
    answer(2, salted, cache_salt="another tenant")
    assert refused() == before + 3
    answer(2, salted, cache_salt="tenant")  # or its lease would last for half a minute
    assert refused() == before + 3
    for number in range(3):
        answer(number, None)
    for (number, _), thief in zip(attempts, thieves, strict=True):
        answer(number, None, cache_salt=thief)
    wait_for(lambda: served.metric(served.prefill, "kvferry_leases") == 0, 60)


def test_metrics_page_has_every_metric_of_top_and_dashboards(served):
    page = served.client.get(f"{served.decode}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    own = {name: metric for name, metric in EXPOSED.items() if CONNECTOR not in metric.labels}
    assert {name: kinds.get(name) for name in own} == {name: str(each.kind) for name, each in own.items()}
    for name, metric in own.items():
        for labels in re.findall(rf"^{name}(?:_bucket|_sum|_count)?{{(.*)}} ", page, re.MULTILINE):
            asked = {*COMMON, *metric.labels}
            assert set(re.findall(r'(\w+)="', labels)) - {"le"} == asked, name


class Router:
    """A `kvferry router` over both engines, in any role, and over the decode engine through `cutter` too."""

    def __init__(self, served: Served, folder: Path) -> None:
        self._file = folder / "engines"
        self._client, self.served = served.client, served
        address = urlsplit(served.decode)
        self.cutter = Cutter(address.hostname, address.port)
        self._write(f"prefill {served.prefill}", f"decode {served.decode}")
        command = [*KVFERRY, "router", "--engines-file", str(self._file), "--port", "0"]
        command += ["--min-prefill-tokens", "0"]
        self.log = folder / "log"
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.url = self._process.stdout.readline().split()[-1].removesuffix("/v1")

    def _write(self, *lines: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(lines))
        new.rename(self._file)

    def use(self, *lines: str) -> None:
        """Give the router these engines, and wait until they are up. Streams begin at the last one."""
        self._write(*lines)
        *others, last = (line.split()[1] for line in lines)
        self._session = session_for(last, others)
        wanted = {"prefill": [], "decode": []}
        for role, url in map(str.split, lines):
            for task in wanted if role == "both" else [role]:
                wanted[task].append(url)

        def found() -> dict[str, list[str]]:
            health = self._client.get(f"{self.url}/health").json()
            return {task: [one["url"] for one in health[task] if one["up"]] for task in wanted}

        wait_for(lambda: found() == wanted)

    def stream(self, path: str, **body) -> Iterator[str]:
        """Yield the lines of a stream, as they come."""
        body = {"model": self.served.model, "temperature": 0, "ignore_eos": True, "stream": True, **body}
        headers = {"x-session-id": self._session}
        with self._client.stream("POST", self.url + path, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            yield from answer.iter_lines()

    def continued(self) -> float:
        return self.served.metric(self.url, "kvferry_router_continued_streams_total")

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(30) == 0
        self._process.stdout.close()
        self.cutter.__exit__(None, None, None)


@pytest.fixture(scope="module")
def router(served, tmp_path_factory):
    router = Router(served, tmp_path_factory.mktemp("router"))
    yield router
    router.close()


@pytest.fixture(scope="module")
def words(model) -> list[int]:
    """Tokens of whole words."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    return [
        number for token, number in tokenizer["model"]["vocab"].items() if re.fullmatch("\u0120[a-z]+", token)
    ]


LONG = 60


def asked(path: str, words: list[int], name: str) -> dict:
    text = f"{name} {TEXT * 12}"
    prompt = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    usage = {"stream_options": {"include_usage": True}}
    return {**prompt, "max_tokens": LONG, "allowed_token_ids": words, **usage}


def whole(lines: list[str]) -> tuple[str, list[str], dict]:
    """Text, finish reasons and numbers of tokens of a stream with one id and time of creation."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]", events[-1]
    found = [json.loads(event) for event in events[:-1]]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in found}) == 1
    choices = [choice for one in found for choice in one["choices"]]
    assert not [choice for choice in choices if choice.get("token_ids")]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    counts = {name: found[-1]["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    return text, [one["finish_reason"] for one in choices if one["finish_reason"]], counts


PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_cut_anywhere_goes_on_at_the_other_engine(served, router, words, path):
    router.use(f"both {served.prefill}", f"decode {router.cutter.url}")
    body = asked(path, words, f"Cut {path}")
    alone = whole([*router.stream(path, **body)])
    assert alone[1] == ["length"]
    assert alone[2]["completion"] == LONG
    assert len(set(alone[0].split())) > LONG // 4, "hardly a word is repeated"
    points, before = random.Random(path), router.continued()
    for number in range(1, 6):
        router.use(f"both {served.prefill}", f"decode {router.cutter.url}")
        # The first event has the token ids of the prompt, without which another engine begins anew.
        router.cutter.place = in_event(points.randrange(1, LONG), points.random())
        assert whole([*router.stream(path, **body)]) == alone
        assert router.cutter.place is None, "it was cut"
        wait_for(lambda: router.continued() == before + number)  # noqa: B023 - it is called at once
    # The rest of another prompt's answer is another text.
    assert whole([*router.stream(path, **asked(path, words, "Other"))])[0] != alone[0]


def test_events_of_a_stream_are_the_engines_own(served, router, words):
    """How many tokens are in an event is a matter of time."""
    router.use(f"both {served.prefill}", f"both {served.decode}")
    for path in PATHS:
        body = {"model": served.model, "temperature": 0, "stream": True, **asked(path, words, "Events")}
        told = []
        for salt, url in (("routed", router.url), ("alone", served.decode)):
            body["cache_salt"] = salt  # or the usage would tell that it was computed before
            answer = served.client.post(url + path, json=body, headers={"x-request-id": "events"})
            events = re.sub(r'"created":\d+|"(?:text|content)":"[^"]+"', "", answer.text)
            told.append((whole(answer.text.splitlines())[0], {*events.splitlines()}))
        assert told[0] == told[1]


def test_a_stream_of_an_engine_that_aborts_it_goes_on_at_the_other_engine(served, router, words):
    """As an engine does that is stopped."""
    path = PATHS[0]
    router.use(f"both {served.prefill}", f"decode {router.cutter.url}")
    body, before = asked(path, words, "Stopped") | {"max_tokens": 300}, router.continued()
    alone = whole([*router.stream(path, **body)])
    lines = []
    for line in router.stream(path, **body):
        if len(lines) == 20:
            assert served.client.post(f"{served.decode}/pause?mode=abort").status_code == 200
        lines.append(line)
    assert served.client.post(f"{served.decode}/resume").status_code == 200
    assert whole(lines) == alone
    wait_for(lambda: router.continued() == before + 1)


def test_engines_change_their_roles_while_they_serve(served, router):
    """Both ways: an engine does what the router asks for, whatever role it was started with."""
    path, hits = "/v1/completions", "vllm:external_prefix_cache_hits_total"
    engines = served.prefill, served.decode
    for turn, (prefill, decode) in enumerate([engines, engines[::-1]]):
        router.use(f"prefill {prefill}", f"decode {decode}")
        text = f"Turn {turn}: {TEXT * 15}"
        before = {url: served.metric(url, hits) for url in engines}
        streaming = router.stream(path, prompt=text, max_tokens=300)
        lines = [next(streaming)]
        router.use(f"prefill {decode}", f"decode {prefill}")
        # A new request follows the new roles, while the one under way goes on as it began.
        new = served.post(router.url, path, prompt=f"New: {text}").json()["choices"][0]["text"]
        assert served.metric(decode, "vllm:num_requests_running") == 1
        lines += streaming
        said = "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")
        )
        assert lines[-2:] == ["data: [DONE]", ""]
        for url, prompt, tokens, found in ((decode, text, 300, said), (prefill, f"New: {text}", 12, new)):
            assert served.metric(url, hits) - before[url] >= 300
            alone = served.post(url, path, prompt=prompt, max_tokens=tokens, cache_salt="roles").json()
            assert found == alone["choices"][0]["text"]
    assert "changes its role from decode to prefill" in router.log.read_text()


@pytest.mark.long
def test_router_serves_without_a_dead_engine_until_its_restart(served, router, words):
    prompt = TEXT * 12
    router.use(f"both {served.decode}", f"decode {served.prefill}")
    [pid] = [
        pid
        for pid in processes_below(served.process.pid)
        if f"--port\0{urlsplit(served.prefill).port}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"kvferry.tools.serving.guard" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    body = asked(PATHS[0], words, "Killed") | {"max_tokens": 300}
    lines = []
    for line in router.stream(PATHS[0], **body):
        if len(lines) == 20:
            os.kill(pid, signal.SIGKILL)
        lines.append(line)
    router.use(f"both {served.decode}", f"decode {router.cutter.url}")
    assert whole(lines) == whole([*router.stream(PATHS[0], **body)])
    wait_for(lambda: "prefill-0 ended with signal 9" in served.errors.read_text())
    wait_for(lambda: served.client.get(f"{served.url}/health").json()["status"] == "degraded")
    answer = served.post(served.url, "/v1/completions", prompt=prompt).json()
    alone = served.post(served.decode, "/v1/completions", prompt=prompt, cache_salt="d").json()
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    wait_for(lambda: "prefill-0 is ready again after" in served.errors.read_text(), 180)
    wait_for(lambda: served.client.get(f"{served.url}/health").json()["status"] == "ok")
    offered = served.metric(served.prefill, GRANTED)
    assert served.post(served.url, "/v1/completions", prompt=prompt + "Again").status_code == 200
    wait_for(lambda: served.metric(served.prefill, GRANTED) == offered + 1)


def test_ctrl_c_leaves_no_process_port_or_shared_memory(served):
    below = processes_below(served.process.pid)
    segments = shared_memory_of(below)
    assert below
    body = {"prompt": TEXT, "max_tokens": 900, "stream": True}
    answers = []
    caller = threading.Thread(
        target=lambda: answers.append(served.post(served.url, "/v1/completions", **body))
    )
    caller.start()
    wait_for(lambda: served.metric(served.decode, "vllm:num_requests_running") == 1)
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 130
    caller.join(10)
    assert answers[0].text.rstrip().splitlines()[-1].startswith(("data: [DONE]", 'data: {"error"'))
    assert "Traceback" not in served.errors.read_text()
    assert not [pid for pid in below if alive(pid)]
    assert not [name for name in segments if Path("/dev/shm", name).exists()]
    explain("nobody")  # vLLM kills its schedulers: whoever asks next removes their sockets
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"], "kvferry").iterdir())
    for url in (served.url, served.prefill, served.decode):
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", urlsplit(url).port)) != 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_engine_served_alone_has_tiers(running, model, tmp_path):
    running.close()
    (tmp_path / "kv").mkdir()
    tiers = json.dumps(
        [{"type": "host", "capacity": "64MiB"}, {"type": "file", "path": str(tmp_path / "kv")}]
    )
    command = [*KVFERRY, "serve", str(model), "--role", "both", "--tiers", tiers, "--port", "0"]
    command += ["--log-dir", str(tmp_path / "logs"), "--", *ENGINE]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        body = {"model": str(model), "prompt": TEXT * 30, "max_tokens": 2}
        assert httpx.post(f"{url}/completions", json=body, timeout=60, trust_env=False).status_code == 200
        health = httpx.get(url.removesuffix("/v1") + "/health", trust_env=False).json()
        wait_for(lambda: [*(tmp_path / "kv").rglob("*.kv")])
        process.terminate()
        assert process.wait(60) == 0
    assert (health["status"], len(health["prefill"]), len(health["decode"])) == ("ok", 0, 1)


@pytest.mark.long
def test_a_model_that_does_not_fit_is_one_sentence(running, model, tmp_path):
    running.close()
    command = [*KVFERRY, "serve", str(model), "--port", "0", "--log-dir", str(tmp_path)]
    arguments = ["--enforce-eager", "--dtype=float32", "--max-model-len=99999999"]
    done = subprocess.run(
        [*command, "--", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(r"kvferry: \w+-0 ended with exit code 1: .*max_model_len.* \(log: .*-0\.log\)$", last)
    assert done.stdout == ""
