"""Routers of other projects, unmodified, in front of a prefill and a decode engine."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.launch import Fleet, fleet_specs
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.apart import apart, needs
from support.fronts import Engines, answer, answers, bodies, front
from support.llm_d import Sidecar

FRONTS = apart("fronts")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(300),
    needs("fronts"),
]

REQUESTS = 32
ENGINE = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    f"--kv-cache-memory-bytes={64 << 20}",
)


@pytest.fixture(scope="module")
def engines(running, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    running.close()
    folder = tmp_path_factory.mktemp("fronts")
    model, log = str(tiny_checkpoint("qwen3", checkpoints)), folder / "transfers.jsonl"
    specs = fleet_specs(model, decode_settings={"transfer_log": str(log)}, arguments=ENGINE)
    with Fleet(specs, folder) as fleet:
        fleet.wait_ready()
        yield Engines(model, *fleet.prefill_urls, *fleet.decode_urls, log)


def proxy(engines: Engines, log: Path) -> AbstractContextManager[str]:
    """vLLM's proxy of its tests of NixlConnector."""
    return proxy_of_vllm("toy_proxy_server.py", "/healthcheck", engines, log)


def multi_turn_proxy(engines: Engines, log: Path) -> AbstractContextManager[str]:
    """vLLM's example of a proxy that remembers conversations."""
    return proxy_of_vllm("disagg_proxy_multiturn.py", "/health", engines, log)


def proxy_of_vllm(file: str, health: str, engines: Engines, log: Path) -> AbstractContextManager[str]:
    (port,) = free_ports(1)
    command = [sys.executable, f"{FRONTS}/{file}", "--host", "127.0.0.1", "--port", str(port)]
    for kind, url in (("prefiller", engines.prefill), ("decoder", engines.decode)):
        command += [f"--{kind}-host", urlsplit(url).hostname, f"--{kind}-port", str(urlsplit(url).port)]
    return front(command, f"http://127.0.0.1:{port}", health, log)


def vllm_router(engines: Engines, log: Path) -> AbstractContextManager[str]:
    port, metrics = free_ports(2)
    command = [
        f"{FRONTS}/bin/vllm-router",
        "--vllm-pd-disaggregation",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--prefill", engines.prefill, "--decode", engines.decode, "--prometheus-port", str(metrics)]
    return front(command, f"http://127.0.0.1:{port}", "/health", log)


@pytest.mark.parametrize("start", [proxy, multi_turn_proxy, vllm_router], ids=lambda start: start.__name__)
def test_a_router_gets_the_answers_of_one_engine_and_all_kv_is_moved(engines, tmp_path, start):
    asked = bodies(engines.model, start.__name__, REQUESTS)
    before = engines.transfers()
    with start(engines, tmp_path / "log") as url:
        got = answers(url, asked)
    moved = engines.transfers()[len(before) :]
    judge(engines, asked, got, moved, count=REQUESTS)


def test_requests_of_llm_ds_sidecar_move_the_kv(engines):
    asked = bodies(engines.model, "sidecar", REQUESTS)
    before = engines.transfers()
    sidecar = Sidecar(engines.prefill, engines.decode)
    got = [
        answer(sidecar, path, body, **{"x-request-id": f"caller-{n}"}) for n, (path, body) in enumerate(asked)
    ]
    judge(engines, asked, got, engines.transfers()[len(before) :], count=REQUESTS)


def test_every_prompt_is_moved_but_one_of_a_single_token(engines, tmp_path):
    """The decode engine computes the last token of a prompt in any case."""
    one = {"model": engines.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    asked = [("/v1/completions", {**one, "prompt": [*range(50, 50 + n)][::-1]}) for n in range(1, 9)]
    before = engines.transfers()
    with vllm_router(engines, tmp_path / "log") as url:
        got = answers(url, asked)
    moved = engines.transfers()[len(before) :]
    assert sorted(each["tokens"] for each in moved) == [*range(1, 8)]
    judge(engines, asked, got, moved, count=7)


def judge(engines: Engines, asked: list, got: list[str], moved: list[dict], *, count: int) -> None:
    """Compare with the decode engine alone, for which nothing moves."""
    assert [each["outcome"] for each in moved] == ["ready"] * count
    assert len({each["request_id"] for each in moved}) == count
    before = len(engines.transfers())
    alone = answers(
        engines.decode, [(path, {**body, "cache_salt": uuid.uuid4().hex}) for path, body in asked]
    )
    assert got == alone
    assert len(set(alone)) == len(asked), "answers do not depend on prompts"
    assert len(engines.transfers()) == before
