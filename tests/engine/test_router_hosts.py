"""The router beside the decode engine, a prefill engine of two ranks on another host, served over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import pytest

from kvferry.serving.demo.client import StreamedAnswer, ask
from kvferry.serving.demo.pair import family_model
from kvferry.serving.demo.transfers import Transfer, read_transfer
from kvferry.serving.engine import EngineSpec
from kvferry.serving.launch import Fleet, Role, fleet_specs
from kvferry.serving.tiny import tiny_checkpoint
from support.namespaces import Host
from support.vllm_engine import copied
from support.vllm_engine.pair import prompt
from support.vllm_engine.plugins import with_plugins
from support.vllm_engine.ranks import ARGUMENTS, ENVIRONMENT, ask_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEP = 256
"""Tokens of a step: the prefill engine computes a longer prompt in several, and is read from meanwhile."""

ROUTER = (sys.executable, "-c", "from kvferry.cli.main import main; main()", "router")


@dataclass(frozen=True)
class PlacedSpec(EngineSpec):
    """An engine to be started on a host."""

    on: Host | None = None

    def command(self) -> list[str]:
        return self.on.command(*super().command())


def placed(spec: EngineSpec, host: Host, environment: dict[str, str]) -> PlacedSpec:
    told = {each.name: getattr(spec, each.name) for each in fields(spec)}
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.device, "VLLM_HOST_IP": host.address}
    told |= {"host": host.address, "environment": {**spec.environment, **environment, **network}}
    return PlacedSpec(**told, on=host)


@dataclass(frozen=True)
class Served:
    """Where the engines and the router are."""

    router: str
    prefill: str
    decode: str
    model: str
    log: Path

    def through(self, text: list[int]) -> tuple[StreamedAnswer, Transfer | None]:
        """The router's answer, and what moved for it."""
        name = f"hosts-{uuid.uuid4().hex}"
        return self._ask(self.router, text, name), read_transfer(self.log, name)

    def alone(self, url: str, text: list[int]) -> StreamedAnswer:
        """An answer of one engine, from nothing cached."""
        return self._ask(url, text, "alone", cache_salt=uuid.uuid4().hex)

    def _ask(self, url: str, text: list[int], name: str, **more: str) -> StreamedAnswer:
        body = {"model": self.model, "prompt": text, "max_tokens": 8, "logprobs": 5, **more}
        with httpx.Client(timeout=60, trust_env=False) as client:
            return ask(client, url, body, request_id=name)


@pytest.fixture(scope="module")
def served(
    running: object, hosts: tuple[Host, Host], checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    running.close()
    folder = tmp_path_factory.mktemp("router-hosts")
    model, log = str(tiny_checkpoint("gemma3", checkpoints)), folder / "transfers.jsonl"
    secret = folder / "secret"
    secret.write_text("what both hosts know and no one else")
    secret.chmod(0o600)
    # Every rank tells peers the address of the host that it runs on.
    settings = {"host": "node", "secret_file": str(secret)}
    specs = fleet_specs(
        model,
        prefill_tensor_parallel=2,
        prefill_settings=settings,
        decode_settings={**settings, "transfer_log": str(log)},
        arguments=(*family_model("gemma3").arguments, *ARGUMENTS, f"--max-num-batched-tokens={STEP}"),
    )
    here = {Role.PREFILL: hosts[0], Role.DECODE: hosts[1]}
    environment = ENVIRONMENT | with_plugins(folder / "plugins", copied)
    specs = [placed(spec, here[spec.role], environment) for spec in specs]
    with Fleet(specs, folder) as fleet, hosts[1].visited():
        fleet.wait_ready()
        (prefill,), (decode,) = fleet.prefill_urls, fleet.decode_urls
        engines = ("--prefill", prefill, "--decode", decode)
        command = hosts[1].command(*ROUTER, *engines, "--port", "0", "--min-prefill-tokens", "0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
            try:
                line = router.stdout.readline()
                url = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)[1]
                yield Served(url, prefill, decode, model, log)
            finally:
                router.terminate()


def test_an_answer_of_the_router_is_a_single_engines_and_its_kv_came_over_the_wire(
    served: Served, hosts: tuple[Host, Host]
) -> None:
    for length in (301, 40, 700):
        text = prompt(length, length)
        before = hosts[1].received_bytes()
        answer, transfer = served.through(text)
        came = hosts[1].received_bytes() - before
        assert transfer is not None, "nothing was loaded"
        assert transfer.outcome == "ready", transfer.reason
        assert hosts[0].address in transfer.peer
        assert transfer.tokens == length - 1
        # The router knows the prefill engine from its first answer on.
        assert (transfer.reads > 1) == (length == 700)
        assert came > transfer.bytes > 0, "the bytes took another way"
        for url in (served.prefill, served.decode):
            alone = served.alone(url, text)
            assert answer.tokens == alone.tokens
            assert answer.logprobs[0] == pytest.approx(alone.logprobs[0], abs=1e-4)


def test_a_spoiled_load_changes_the_answer_of_the_router(served: Served) -> None:
    text = prompt(100, 500)
    ask_ranks(served.decode, "witness_loads", 0)
    spoiled, transfer = served.through(text)
    ask_ranks(served.decode, "witness_loads", None)
    assert transfer is not None
    assert transfer.outcome == "ready"
    assert spoiled.logprobs[0] != pytest.approx(served.alone(served.decode, text).logprobs[0], abs=1e-3)


def test_the_router_is_only_found_where_it_runs(served: Served, hosts: tuple[Host, Host]) -> None:
    with hosts[0].visited(), pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.router}/health", trust_env=False)
    assert httpx.get(f"{served.router}/health", trust_env=False).json()["status"] == "ok"
