"""The router beside the decode engine, a prefill engine of two ranks on two hosts, served over HTTP.

The engine on two hosts has tiers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.tools.serving.demo.client import StreamedAnswer, ask
from kvferry.tools.serving.demo.pair import family_model
from kvferry.tools.serving.demo.report import Transfer, read_transfer
from kvferry.tools.serving.devices import Devices
from kvferry.tools.serving.engine import EngineSpec
from kvferry.tools.serving.launch import Fleet, Role
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from kvferry.tools.serving.specs import EngineGroup, group_specs
from kvferry.tools.serving.tiny import tiny_checkpoint
from kvferry.transport.security import admin_token, read_keys
from support.ended import end
from support.namespaces import Host
from support.vllm_engine import copied
from support.vllm_engine.pair import prompt
from support.vllm_engine.plugins import with_plugins
from support.vllm_engine.ranks import ARGUMENTS, ENVIRONMENT, ask_ranks
from support.vllm_engine.tiered import chunk_files, spoil
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

STEP = 256
"""Tokens of a step: the prefill engine computes a longer prompt in several, and is read from meanwhile."""

# vLLM's command has this option, its module that serves does not.
HEADLESS = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
arguments.api_server_count = 0
run_headless(arguments)
"""
ROUTER = (sys.executable, "-c", "from kvferry.tools.cli.main import main; main()", "router")
ADMIN_PORT = 29_502


@dataclass(frozen=True)
class PlacedSpec(EngineSpec):
    """An engine, or the node of one, to be started on a host.

    Attributes:
        on: the host.
        nodes: hosts of all nodes of the engine.
    """

    on: Host | None = None
    nodes: tuple[Host, ...] = ()

    def command(self) -> list[str]:
        number = self.nodes.index(self.on)
        python, *module, model = super().command()[:4]
        rest = super().command()[4:]
        if len(self.nodes) > 1:
            rest += ["--nnodes", str(len(self.nodes)), "--node-rank", str(number)]
            rest += ["--master-addr", self.nodes[0].address, "--master-port", "29501"]
        if number > 0:
            module, rest = ["-c", HEADLESS], [*rest, "--headless"]
        return self.on.command(python, *module, model, *rest)


def placed(spec: EngineSpec, nodes: tuple[Host, ...], number: int, environment: dict[str, str]) -> PlacedSpec:
    host = nodes[number]
    told = {each.name: getattr(spec, each.name) for each in fields(spec)}
    network = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": host.device, "VLLM_HOST_IP": host.address}
    network["GLOO_SOCKET_IFNAME"] = host.device
    told |= {"host": host.address, "environment": {**spec.environment, **environment, **network}}
    return PlacedSpec(**told, on=host, nodes=nodes)


@contextmanager
def second_node(spec: PlacedSpec, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node that serves nothing itself. It ends with the first node, or here."""
    # vLLM leaves sockets and files in TMPDIR. A socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvf") as temporary:
        with log.open("wb") as output:
            environment = {**os.environ, **spec.environment, "TMPDIR": temporary}
            node = subprocess.Popen(spec.command(), env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield node
        finally:
            end(node)


@dataclass(frozen=True)
class Served:
    """Where the engines and the router are.

    Attributes:
        router, prefill, decode: URLs. The prefill engine's ranks are on two hosts.
        model: path of the model.
        logs: transfer logs of the prefill and of the decode engine.
        chunks: directory of the prefill engine's file tier.
        secret: the key of all engines.
    """

    router: str
    prefill: str
    decode: str
    model: str
    logs: tuple[Path, Path]
    chunks: Path
    secret: Path

    def through(self, text: list[int]) -> tuple[StreamedAnswer, Transfer | None]:
        """The router's answer, and what moved for it."""
        name = f"hosts-{uuid.uuid4().hex}"
        return self._ask(self.router, text, name), read_transfer(self.logs[1], name)

    def back(self, text: list[int]) -> tuple[StreamedAnswer, Transfer | None]:
        """The answer of the engine on two hosts, with the KV of the other engine, and what moved for it."""
        name = f"back-{uuid.uuid4().hex}"
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "kv_transfer_params": ASK_FOR_KV}
        offered = httpx.post(f"{self.decode}/v1/completions", json=body, timeout=60, trust_env=False)
        offer = {"kv_transfer_params": offered.raise_for_status().json()["kv_transfer_params"]}
        return self._ask(self.prefill, text, name, **offer), read_transfer(self.logs[0], name)

    def alone(self, url: str, text: list[int]) -> StreamedAnswer:
        """An answer of one engine, from nothing cached."""
        return self._ask(url, text, "alone", cache_salt=uuid.uuid4().hex)

    def _ask(self, url: str, text: list[int], name: str, **more: Any) -> StreamedAnswer:
        body = {"model": self.model, "prompt": text, "max_tokens": 8, "logprobs": 5, **more}
        with httpx.Client(timeout=60, trust_env=False) as client:
            return ask(client, url, body, request_id=name)

    def again(
        self, text: list[int], scheduler: Host, *, from_files: bool
    ) -> tuple[StreamedAnswer, dict[str, int]]:
        """The answer of the engine on two hosts, which has forgotten the prompt, and what its tiers loaded.

        `scheduler` is the host of its scheduler.
        """
        httpx.post(f"{self.prefill}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
        if from_files:
            with scheduler.visited():
                wait_for(lambda: self._admin("status")["owed_chunks"] == 0)
                self._admin("drop")
        before = self._loaded()
        answer = self._ask(self.prefill, text, f"again-{uuid.uuid4().hex}")
        wait_for(lambda: self._loaded() != before)
        return answer, dict(self._loaded() - before)

    def _admin(self, call: str) -> dict[str, Any]:
        token = admin_token(read_keys(str(self.secret)))
        answer = httpx.post(
            f"http://127.0.0.1:{ADMIN_PORT}/v1/{call}",
            json={},
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
            trust_env=False,
        )
        return answer.raise_for_status().json()

    def _loaded(self) -> Counter[str]:
        page = httpx.get(f"{self.prefill}/metrics", timeout=60, trust_env=False).text
        found = re.findall(r'hit_tokens_total\{.*source="tiers".*tier="(\w+)".*\} ([\d.]+)', page)
        return Counter({tier: int(float(n)) for tier, n in found})

    def agree(self, answer: StreamedAnswer, text: list[int]) -> None:
        """Check that an answer is that of either engine alone."""
        for url in (self.prefill, self.decode):
            alone = self.alone(url, text)
            assert answer.tokens == alone.tokens
            assert answer.logprobs[0] == pytest.approx(alone.logprobs[0], abs=1e-4)


@pytest.fixture(scope="module")
def served(
    running: object, hosts: tuple[Host, Host], checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    running.close()
    folder = tmp_path_factory.mktemp("router-hosts")
    model = str(tiny_checkpoint("gemma3", checkpoints))
    secret = folder / "secret"
    secret.write_text("what both hosts know and no one else")
    secret.chmod(0o600)
    logs, chunks = (folder / "prefill.jsonl", folder / "decode.jsonl"), folder / "chunks"
    chunks.mkdir()
    tiers = [{"type": "host", "capacity": "64MiB"}, {"type": "file", "path": str(chunks), "capacity": "1GiB"}]
    of_hosts = {"tiers": tiers, "transfer": True, "admin": {"port": ADMIN_PORT}}
    # Every rank tells peers the address of the host that it runs on.
    # In truth both hosts are one machine, and their engines could share memory.
    settings = {"host": "node", "secret_file": str(secret), "strategy": "direct"}
    arguments = (*family_model("gemma3").arguments, *ARGUMENTS, f"--max-num-batched-tokens={STEP}")
    # Each engine computes prompts for the other one.
    groups = [
        EngineGroup(
            role=Role.BOTH,
            tensor_parallel=ranks,
            settings={**settings, **more, "transfer_log": str(log)},
            arguments=arguments,
        )
        for ranks, log, more in zip((2, 1), logs, (of_hosts, {}), strict=True)
    ]
    plain = [group_specs(model, [group], Devices(gpus=(), cores=()))[0] for group in groups]
    environment = ENVIRONMENT | with_plugins(folder / "plugins", copied)
    first, second = (placed(plain[0], hosts, number, environment) for number in range(2))
    other = placed(plain[1], hosts[1:], 0, environment)
    with (
        Fleet([first, replace(other, name="decode")], folder) as fleet,
        second_node(second, folder / "second-node.log") as node,
        hosts[1].visited(),
    ):

        def check(_: object) -> None:
            assert node.poll() is None, (folder / "second-node.log").read_text()

        fleet.wait_ready(check)
        prefill, decode = (engine.spec.url for engine in fleet.engines)
        engines = ("--prefill", prefill, "--decode", decode)
        command = hosts[1].command(*ROUTER, *engines, "--port", "0", "--min-prefill-tokens", "0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
            try:
                line = router.stdout.readline()
                url = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)[1]
                yield Served(url, prefill, decode, model, logs, chunks, secret)
            finally:
                router.terminate()


def test_routed_answer_equals_a_single_engines_and_each_ranks_kv_comes_from_its_host(
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
        # The second rank is on the decode engine's host.
        assert came > transfer.bytes // 2 > 0, "the bytes took another way"
        served.agree(answer, text)


def test_an_engine_on_two_hosts_loads_every_ranks_part(served: Served, hosts: tuple[Host, Host]) -> None:
    for length in (302, 690):
        text = prompt(length, length)
        before = hosts[0].received_bytes()
        answer, transfer = served.back(text)
        assert transfer is not None, "nothing was loaded"
        assert transfer.outcome == "ready", transfer.reason
        assert hosts[1].address in transfer.peer
        assert hosts[0].received_bytes() - before > transfer.bytes // 2 > 0
        served.agree(answer, text)


def test_a_spoiled_load_changes_the_answer_of_the_router(served: Served) -> None:
    text = prompt(100, 500)
    ask_ranks(served.decode, "witness_loads", 0)
    spoiled, transfer = served.through(text)
    ask_ranks(served.decode, "witness_loads", None)
    assert transfer is not None
    assert transfer.outcome == "ready"
    assert spoiled.logprobs[0] != pytest.approx(served.alone(served.decode, text).logprobs[0], abs=1e-3)


@pytest.mark.parametrize("rank", range(2))
def test_a_spoiled_load_of_a_rank_on_either_host_changes_the_answer(served: Served, rank: int) -> None:
    text = prompt(100, 501 + rank)
    ask_ranks(served.prefill, "witness_loads", rank)
    spoiled, transfer = served.back(text)
    ask_ranks(served.prefill, "witness_loads", None)
    assert transfer is not None
    assert transfer.outcome == "ready"
    assert spoiled.logprobs[0] != pytest.approx(served.alone(served.decode, text).logprobs[0], abs=1e-3)


def test_an_engine_on_two_hosts_loads_its_prompts_from_its_tiers(
    served: Served, hosts: tuple[Host, Host]
) -> None:
    text, earlier = prompt(690, 77), set(served.chunks.rglob("*.kv"))
    served._ask(served.prefill, text, "stored")
    for tier in ("host", "file"):
        before = hosts[1].received_bytes()
        answer, loaded = served.again(text, hosts[0], from_files=tier == "file")
        assert loaded == {tier: pytest.approx(len(text), abs=1)}
        served.agree(answer, text)
        if tier == "file":
            size = sum(path.stat().st_size for path in {*served.chunks.rglob("*.kv")} - earlier)
            assert hosts[1].received_bytes() - before > size // 4 > 0, "its share took another way"


def test_spoiled_chunk_files_change_the_answer_of_an_engine_on_two_hosts(
    served: Served, hosts: tuple[Host, Host]
) -> None:
    text = prompt(690, 78)
    served._ask(served.prefill, text, "stored")
    _, loaded = served.again(text, hosts[0], from_files=True)
    assert "file" in loaded
    for paths in chunk_files(served.chunks).values():
        for path in paths:
            spoil(path, with_checksum=True)
    spoiled, _ = served.again(text, hosts[0], from_files=True)
    assert spoiled.logprobs[0] != pytest.approx(served.alone(served.decode, text).logprobs[0], abs=1e-3)


def test_router_listens_only_on_its_own_host(served: Served, hosts: tuple[Host, Host]) -> None:
    with hosts[0].visited(), pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.router}/health", trust_env=False)
    assert httpx.get(f"{served.router}/health", trust_env=False).json()["status"] == "ok"
