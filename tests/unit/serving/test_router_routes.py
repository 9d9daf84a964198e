"""Every path of vLLM's API server, and what the router does with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvferry.tools.serving.router.app import REFUSED, RouterApp
from kvferry.tools.serving.router.settings import RouterSettings
from support.waiting import wait_for

ALL_ROUTES = """
import json
from types import SimpleNamespace

from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

options = ["--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-fault-tolerance"]
args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
model = SimpleNamespace(get_pooling_task=lambda _: "embed")
app = build_app(args, (*GENERATION_TASKS, *POOLING_TASKS), model)
found = {(method, one.path) for one in app.routes for method in getattr(one, "methods", None) or ["GET"]}
print(json.dumps(sorted(found)))
"""
SWITCHES = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API", "VLLM_SERVER_DEV_MODE")
TABLE = [
    (method, route.path)
    for route in RouterApp(RouterSettings(prefill=(), decode=("http://d",))).routes
    if route.path not in REFUSED
    for method in route.methods - {"HEAD"}
]


@pytest.fixture(scope="module")
def vllm_routes() -> set[tuple[str, str]]:
    """Methods and paths of vLLM's server for all tasks, with all options that add some."""
    pytest.importorskip("vllm.entrypoints.launchers")  # not its server: that takes as long as the process
    environment = {**os.environ, **dict.fromkeys(SWITCHES, "1")}
    command = [sys.executable, "-c", ALL_ROUTES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    routes = {tuple(route) for route in json.loads(done.stdout.splitlines()[-1])}
    return {(method, path) for method, path in routes if method not in ("HEAD", "OPTIONS")}


def test_every_route_of_vllm_is_in_the_routers_table(vllm_routes):
    assert len(vllm_routes) > 60
    new = {(method, path) for method, path in vllm_routes if path not in REFUSED} - set(TABLE)
    assert not new, (
        f"decide what the router does with {sorted(new)}: add what reads a prompt to DECODE_ONLY "
        "(router/bodies.py), a question that any engine can answer to _PASSED_THROUGH, and what clients must "
        "not reach to REFUSED (router/app.py)"
    )


def test_no_path_is_in_the_table_twice():
    paths = [*(path for _, path in TABLE), *REFUSED]
    assert {path for path in paths if paths.count(path) > 1} == {"/ping"}


@pytest.mark.slow
def test_the_router_says_why_it_does_not_relay_a_request(stage, fake):
    scene = stage([fake()], [fake()])
    for path, reason in REFUSED.items():
        sent = path.replace("{adapter_name}", "a")
        for method in ("GET", "POST", "DELETE"):
            answer = scene.client.request(method, sent)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, 404)
            assert error["message"] == f"this router does not relay {method} {sent}: {reason}"


@pytest.mark.slow
def test_load_is_the_number_of_requests_under_way(stage, fake):
    scene = stage([fake()], [fake(event_seconds=3600.0)], api_keys=("k",))
    headers = {"Authorization": "Bearer k"}
    assert scene.client.get("/load").json() == {"server_load": 0}
    body = {"input": "x", "stream": True}
    with scene.client.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
        events = answer.iter_raw()
        next(events)
        assert scene.client.get("/load").json() == {"server_load": 1}
    wait_for(lambda: scene.client.get("/load").json() == {"server_load": 0})


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}], ids=str
)
def test_an_invocation_of_a_completion_is_prefilled_elsewhere(stage, fake, kv, prompt):
    scene = stage([fake(hands_over=kv)], [fake()])
    body = {**prompt, "max_tokens": 5, "kv_transfer_params": {"forged": 1}}
    assert scene.client.post("/invocations", json=body).status_code == 200
    assert scene.prefill[0].bodies[0]["max_tokens"] == 1
    assert scene.decode[0].bodies[0] == {**prompt, "max_tokens": 5, "kv_transfer_params": kv}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"input": "x"}),
        ("/invocations", {"messages": [], "echo": True}),
        ("/invocations", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]]}),
    ],
    ids=str,
)
def test_other_invocations_and_batches_of_chats_go_to_a_decode_engine_alone(stage, fake, kv, path, body):
    scene = stage([fake(hands_over=kv)], [fake()])
    assert scene.client.post(path, json={**body, "kv_transfer_params": kv}).status_code == 200
    assert scene.prefill[0].raw == []
    assert scene.decode[0].bodies == [body]
