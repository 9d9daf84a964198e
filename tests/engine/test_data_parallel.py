"""`kvferry serve` of engines with two data-parallel ranks, each of which is a peer of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.tools.serving.demo.pair import family_model
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import engine_client
from support.vllm_engine import copied, experts
from support.vllm_engine.pair import prompt
from support.vllm_engine.plugins import with_plugins
from support.vllm_engine.ranks import ARGUMENTS, ENVIRONMENT, ask_ranks
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

KVFERRY = [sys.executable, "-c", "from kvferry.tools.cli.main import main; main()"]
RANKS = 2
PAIRS = [(prefill, decode) for prefill in range(RANKS) for decode in range(RANKS)]


class Served:
    """A running `kvferry serve` of one prefill and one decode engine."""

    def __init__(self, family: str, checkpoints: Path, folder: Path) -> None:
        self.model = str(tiny_checkpoint(family, checkpoints))
        arguments = [*family_model(family).arguments, *ARGUMENTS, "--data-parallel-size", str(RANKS)]
        environment = os.environ | ENVIRONMENT | with_plugins(folder / "plugins", copied, experts)
        self._errors = folder / "stderr"
        command = [*KVFERRY, "serve", self.model, "--port", "0", "--log-dir", str(folder), "--", *arguments]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        line = self._process.stdout.readline()
        found = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)
        assert found, self._errors.read_text()
        self.router = found[1]
        self._client = engine_client(120)
        self.health = self._client.get(f"{self.router}/health").json()
        self.prefill, self.decode = self.health["prefill"][0]["url"], self.health["decode"][0]["url"]

    def offer(self, text: list[int], rank: int) -> dict[str, Any]:
        """What that rank of the prefill engine offers after it has computed a prompt."""
        answer = self._post(self.prefill, text, rank, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
        return answer["kv_transfer_params"]

    def answer(self, url: str, text: list[int], rank: int | None = None, **more: Any) -> dict[str, Any]:
        """Tokens and log probabilities of an answer."""
        return self._post(url, text, rank, **more)["choices"][0]["logprobs"]

    def alone(self, url: str, text: list[int], rank: int) -> dict[str, Any]:
        """The answer of one rank, from nothing cached."""
        return self.answer(url, text, rank, cache_salt=uuid.uuid4().hex)

    def _post(self, url: str, text: list[int], rank: int | None, **more: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 5, "return_tokens_as_token_ids": True, **more}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = self._client.post(f"{url}/v1/completions", json=body, headers=headers)
        return answer.raise_for_status().json()

    def counts(self) -> Counter[str]:
        """Loads, leases and ends of leases of every rank, as the engines' metrics count them."""
        found: Counter[str] = Counter()
        for role, url in (("prefill", self.prefill), ("decode", self.decode)):
            told = self._client.get(f"{url}/metrics").text
            for name, labels, value in re.findall(r"^kvferry_(\w+)_total{(.*)} (\S+)$", told, re.MULTILINE):
                if name in ("loads", "leases_granted", "leases_ended"):
                    label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                    key = [role, label["engine"], name, *filter(None, [label.get("outcome")])]
                    found[" ".join(key)] = int(float(value))
        return found

    def counted(self, before: Counter[str], expected: Counter[str]) -> None:
        """Wait until the counts have grown by these, which vLLM publishes after its steps."""
        wait_for(lambda: self.counts() - before == expected)

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(
    scope="module",
    # Ranks of a dense model are independent; those of a mixture of experts compute every step together.
    params=["gemma3", "gptoss"],
)
def served(
    request: pytest.FixtureRequest, running: object, checkpoints: Path, tmp_path_factory: Any
) -> Iterator[Served]:
    running.close()
    served = Served(request.param, checkpoints, tmp_path_factory.mktemp(f"data-{request.param}"))
    yield served
    served.close()


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    near = pytest.approx(other["token_logprobs"], abs=1e-4)
    return answer["tokens"] == other["tokens"] and answer["token_logprobs"] == near


def test_every_rank_of_a_decode_engine_loads_from_every_rank_of_a_prefill_engine(served: Served) -> None:
    channels = {}
    for seed, (prefill, decode) in enumerate(PAIRS):
        text = prompt(300, seed)
        before = served.counts()
        offer = served.offer(text, prefill)
        answer = served.answer(served.decode, text, decode, kv_transfer_params=offer)
        served.counted(
            before,
            Counter(
                {
                    f"prefill {prefill} leases_granted": 1,
                    f"prefill {prefill} leases_ended released": 1,
                    f"decode {decode} loads ready": 1,
                }
            ),
        )
        channels[prefill] = offer["remote_port"]
        assert offer["remote_engine_id"].endswith(f"_dp{prefill}")
        for url, rank in ((served.prefill, prefill), (served.decode, decode)):
            assert same(answer, served.alone(url, text, rank))
    assert len({*channels.values()}) == RANKS, "two ranks share a control channel"


def test_a_spoiled_load_changes_the_answer_of_either_rank(served: Served) -> None:
    for rank in range(RANKS):
        text = prompt(100, 500 + rank)
        offer = served.offer(text, 1 - rank)
        # vLLM asks all data-parallel ranks.
        ask_ranks(served.decode, "witness_loads", 0)
        spoiled = served.answer(served.decode, text, rank, kv_transfer_params=offer)
        ask_ranks(served.decode, "witness_loads", None)
        assert not same(spoiled, served.alone(served.decode, text, rank))


def test_the_router_has_the_kv_of_every_rank_handed_over(served: Served) -> None:
    assert [engine["up"] for engine in served.health["prefill"] + served.health["decode"]] == [True, True]
    texts, before = [prompt(400, 600 + seed) for seed in range(6)], served.counts()
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda text: served.answer(served.router, text), texts))
    chosen = [served.answer(served.router, prompt(200, 700 + rank), rank) for rank in range(RANKS)]
    alone = [served.alone(served.decode, text, rank) for rank, text in enumerate(texts[:RANKS])]
    alone += [served.alone(served.prefill, prompt(200, 700 + rank), rank) for rank in range(RANKS)]
    for answer, single in zip(answers[:RANKS] + chosen, alone, strict=True):
        assert same(answer, single)
    grown = served.counts() - before
    loads, leases = (
        [grown[f"{side} {rank} {what}"] for rank in range(RANKS)]
        for side, what in (("decode", "loads ready"), ("prefill", "leases_granted"))
    )
    assert sum(loads) == sum(leases) == len(texts) + len(chosen), grown
    assert min(loads) > 0
    assert min(leases) > 0


def test_doctor_meets_every_rank(served: Served) -> None:
    engines = ("--prefill", served.prefill, "--decode", served.decode)
    done = subprocess.run(
        [*KVFERRY, "doctor", "--json", "--no-machine", *engines],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    sections = json.loads(done.stdout)["sections"]
    found = [one["found"] for section in sections for one in section["findings"]]
    assert found.count("2 ranks; all answer and have the same settings") == 2, done.stdout
