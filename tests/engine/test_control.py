"""`kvferry cache --engine` with an API server whose engine is idle."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import engine_client
from support.command_line import run_kvferry
from support.ended import end
from support.vllm_engine import copied
from support.vllm_engine.pair import connector, prompt
from support.vllm_engine.plugins import with_plugins
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TEXT = prompt(600, 30)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A vLLM API server whose connector has tiers and the admin API."""

    def __init__(self, model: Path, folder: Path) -> None:
        port, self.admin = free_port(), f"http://127.0.0.1:{(admin := free_port())}"
        self.url, self.model, self.tokens = f"http://127.0.0.1:{port}", str(model), folder / "tokens"
        self.tokens.write_text(json.dumps(TEXT))
        (directory := folder / "chunks").mkdir()
        tiers = [
            {"type": "host", "capacity": "16MiB"},
            {"type": "file", "path": str(directory), "capacity": "256MiB"},
        ]
        transfer = connector(tiers=tiers, transfer=True, admin={"port": admin}, hint_share=0.25)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        environment |= with_plugins(folder / "plugins", copied)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.client = engine_client(60)

    def wait(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(httpx.TransportError):
                return self.client.get(f"{self.url}/health").status_code == 200
            return False

        wait_for(healthy, 200)

    def ask(self, salt: str | None = None, hints: dict[str, Any] | None = None, **more: Any) -> None:
        body: dict[str, Any] = {"model": self.model, "prompt": TEXT, "max_tokens": 2, "temperature": 0}
        if salt:
            body["cache_salt"] = salt
        if hints:
            body["kv_transfer_params"] = {"hints": hints}
        answer = self.client.post(f"{self.url}/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text

    def evict(self, until: Callable[[], bool]) -> None:
        """Store prompts of another tenant until something has been evicted."""
        for seed in range(60):
            if until():
                return
            self.ask("other", prompt=prompt(1000, 1000 + seed), max_tokens=1)
        raise AssertionError("nothing was evicted")

    def cache(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """The JSON answer of `kvferry cache`."""
        done = run_kvferry("cache", *arguments, "--engine", self.admin, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout or "{}")

    def lookup(self, *salt: str) -> dict[str, int]:
        return self.cache("lookup", "--tokens", str(self.tokens), *salt)["tiers"]

    def close(self) -> None:
        self.client.close()
        end(self.process)


@pytest.fixture(scope="module")
def server(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running.close()
    server = Server(tiny_checkpoint("qwen3", checkpoints), tmp_path_factory.mktemp("control"))
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_idle_engine_looks_up_pins_and_drops_chunks_of_a_prompt(server: Server) -> None:
    assert server.lookup() == {"host": 0, "file": 0}
    server.ask()
    wait_for(lambda: server.lookup() == {"host": 600, "file": 600})
    assert server.lookup("--salt", "tenant") == {"host": 0, "file": 0}
    pin = server.cache("pin", "--name", "p", "--tokens", str(server.tokens))
    assert pin["pinned_chunks"] == pin["chunks"] > 0
    assert server.cache("pin", "--name", "p")["unpinned_chunks"] == pin["chunks"]
    assert server.cache("drop")["dropped_chunks"] == pin["chunks"]
    assert server.lookup() == {"host": 0, "file": 600}


def test_chunks_of_a_dropped_salt_are_not_found_again(server: Server) -> None:
    server.ask("tenant")
    assert server.lookup("--salt", "tenant")["host"] == 600
    server.cache("drop", "--salt", "tenant")
    assert server.lookup("--salt", "tenant") == {"host": 0, "file": 0}
    assert server.lookup()["file"] == 600, "others keep theirs"


def counted(server: Server, hint: str, outcome: str) -> float:
    page = server.client.get(f"{server.url}/metrics").text
    found = re.findall(rf'kvferry_hints_total{{.*hint="{hint}",.*outcome="{outcome}".*}} (\S+)', page)
    return sum(map(float, found))


def test_a_prompt_is_prefetched_from_files_by_an_operator_and_by_a_hint_of_its_session(
    server: Server,
) -> None:
    server.ask("a", session_id="s")
    wait_for(lambda: server.lookup("--salt", "a") == {"host": 600, "file": 600})
    at = ["prefetch", "--salt", "a"]
    server.cache("drop")
    assert server.cache("prefetch", "--salt", "b", "--tokens", str(server.tokens), code=1)["chunks"] == 0
    assert server.lookup("--salt", "a")["host"] == 0, "nothing comes without a hint"
    assert server.cache(*at, "--tokens", str(server.tokens))["host_chunks"] == 0
    wait_for(lambda: server.lookup("--salt", "a")["host"] == 600)
    server.cache("drop")
    assert server.cache(*at, "--session", "s", code=2) == {}, "a drop forgets sessions"
    server.ask("a", session_id="s")
    assert server.lookup("--salt", "a")["host"] == 0
    ask = {"prompt": [5], "session_id": "s", "hints": {"prefetch": "session"}}
    server.ask("b", **ask)
    wait_for(lambda: counted(server, "prefetch", "ignored") == 1)
    assert server.lookup("--salt", "a")["host"] == 0
    server.ask("a", **ask)
    wait_for(lambda: server.lookup("--salt", "a")["host"] >= 512)
    wait_for(lambda: counted(server, "prefetch", "applied") == 1)


def test_a_tenants_retained_prompt_survives_another_tenant_and_one_without_a_hint_does_not(
    server: Server,
) -> None:
    server.ask("c", hints={"spans": [{"retain_seconds": 600}]})
    server.ask("d")  # the control
    wait_for(lambda: server.lookup("--salt", "d")["host"] == 600)
    server.evict(lambda: server.lookup("--salt", "d")["host"] == 0)
    assert server.lookup("--salt", "c") == {"host": 600, "file": 600}
    wait_for(lambda: counted(server, "retain", "applied") == 1)


def test_a_prompt_that_must_not_be_stored_is_in_no_tier(server: Server) -> None:
    server.ask("e", hints={"spans": [{"start": 300, "store": False}]})
    server.ask("f")  # the control
    wait_for(lambda: server.lookup("--salt", "f") == {"host": 600, "file": 600})
    assert server.lookup("--salt", "e") == {"host": 256, "file": 256}


def test_at_its_end_a_session_gives_way_first_and_malformed_hints_change_nothing(server: Server) -> None:
    server.cache("drop")
    for salt in "hg":
        server.ask(salt, session_id="s")
    server.ask("h", prompt=[5], session_id="s", hints={"ends_session": 1})
    server.ask("g", prompt=[5], session_id="s", hints={"ends_session": True})
    wait_for(lambda: counted(server, "end_session", "applied") == 1)
    server.evict(lambda: server.lookup("--salt", "g")["host"] < 600)
    assert server.lookup("--salt", "h")["host"] == 600, "it is the older one"
    assert counted(server, "malformed", "ignored") == 1
    assert "send an object as in docs/hints.md" in server.log.read_text()


def test_a_drained_engine_offers_nothing_and_computes_on(server: Server) -> None:
    found = server.cache("drain")
    assert (found["draining"], found["leases"], found["drained"]) == (True, 0, True)
    body = {"model": server.model, "prompt": TEXT, "max_tokens": 1}
    asked = body | {"kv_transfer_params": {"do_remote_decode": True}}
    answer = server.client.post(f"{server.url}/v1/completions", json=asked).json()
    assert not (answer["kv_transfer_params"] or {}).get("remote_request_id")
    server.ask()
    assert server.cache("drain")["drained"]
