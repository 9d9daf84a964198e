"""The next turn of a conversation at another engine, which the router tells where the first one was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import engine_client
from support.token_engine import session_for
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KVFERRY = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()"]
# No engine is named, and there is no directory. The engines of a small machine answer slowly.
TIERS = [{"type": "host", "capacity": "64MiB"}, {"type": "fleet", "find_seconds": 8}]
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
BLOCK = 64
ENGINE = [
    "--enforce-eager",
    f"--block-size={BLOCK}",
    "--dtype=float32",
    "--max-model-len=2048",
    f"--kv-cache-memory-bytes={64 << 20}",
]
TEXT = "The quick brown fox jumps over the lazy dog, and then it does it once more because it can. "


class Fleet:
    """Two engines that serve alone, and the router in front of them."""

    def __init__(self, model: str, url: str) -> None:
        self.model, self.url = model, url
        self.client = engine_client(120)
        self.engines = [one["url"] for one in self.client.get(f"{url}/health").json()["decode"]]
        wait_for(self._known)

    def _known(self) -> bool:
        """Whether the router knows the addresses of both engines' host memory, from their first steps on."""
        for engine in self.engines:
            self.turn(engine, engine, [("user", "hello")])
        return len(self.blocks()) == 2

    def blocks(self) -> dict[str, float]:
        """Number of blocks of each engine that the router knows, if it knows the engine's address too."""
        page = self.client.get(f"{self.url}/metrics").text
        found = re.findall(
            r'^kvferry_router_known_blocks{address=".+?",.*url="(.*)"} (\S+)$', page, re.MULTILINE
        )
        return {url: float(blocks) for url, blocks in found}

    def turn(self, router: str, engine: str, messages: list[tuple[str, str]]) -> dict[str, Any]:
        """Ask a router for the next message of a conversation, which an engine is to write."""
        session = session_for(engine, [one for one in self.engines if one != engine])
        body = {
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = {"x-session-id": session}
        answer = self.client.post(f"{router}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def read(self, engine: str) -> int:
        """Number of tokens that an engine has read in the other's host memory."""
        page = self.client.get(f"{engine}/metrics").text
        return sum(
            int(float(n))
            for n in re.findall(r'^kvferry_hit_tokens_total{.*tier="fleet".*} (\S+)$', page, re.MULTILINE)
        )


@contextmanager
def started(*command: str, folder: Path) -> Iterator[str]:
    """A command of kvferry; yields the URL of its router."""
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    with (
        (folder / "stderr").open("wb") as errors,
        subprocess.Popen(
            [*KVFERRY, *command], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            line = process.stdout.readline()
            assert line.startswith("kvferry: serving on "), (folder / "stderr").read_text()
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def fleet(running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running.close()
    model, folder = str(tiny_checkpoint("qwen3", checkpoints)), tmp_path_factory.mktemp("hints")
    serve = ["serve", model, "--role", "both", "--engines", "2", "--tiers", json.dumps(TIERS)]
    serve += ["--port", "0", "--log-dir", str(folder), "--"]
    serve += [*ENGINE, "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    serve += ["--kv-events-config", json.dumps(EVENTS)]
    with started(*serve, folder=folder) as url:
        yield Fleet(model, url)


def conversation(fleet: Fleet, router: str, subject: str) -> tuple[int, int]:
    """Tokens of the second turn that its engine had not to compute, and that it has read from the other one.

    Another engine answers the second turn than the first one, and that gives the same answer.
    """
    first, second = fleet.engines
    asked = [("user", f"{subject}. {TEXT * 30}")]
    known, read = fleet.blocks()[first], fleet.read(second)
    said = fleet.turn(router, first, asked)["choices"][0]["message"]["content"]
    asked += [("assistant", said), ("user", "And then?")]
    wait_for(lambda: fleet.blocks()[first] >= known + 512 // BLOCK)
    answer = fleet.turn(router, second, asked)
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert answer["usage"]["prompt_tokens"] - cached >= 1
    alone = fleet.turn(router, first, asked)
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    return cached, fleet.read(second) - read


def test_the_next_turn_at_another_engine_is_read_from_the_engine_of_the_last_turn(fleet: Fleet) -> None:
    # An engine waits for the other's answer no longer than computing takes, which is not long.
    found = [conversation(fleet, fleet.url, subject) for subject in ("Foxes", "Bears", "Wolves")]
    cached, read = max(found)
    assert cached == read >= 512
    assert "kvferry_router_hinted_requests_total 3.0" in fleet.client.get(f"{fleet.url}/metrics").text


def test_without_the_events_the_other_engine_computes_it(fleet: Fleet, tmp_path: Path) -> None:
    pair = [argument for url in fleet.engines for argument in ("--prefill", url, "--decode", url)]
    with started("router", *pair, "--port", "0", "--no-follow-events", folder=tmp_path) as router:
        assert conversation(fleet, router, "Dogs") == (0, 0)
