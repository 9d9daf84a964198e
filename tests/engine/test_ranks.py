"""Engines of other tensor parallelism and block size, served: every rank gets its heads, and only those."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.serving.demo.client import Answer, ask
from kvferry.serving.demo.endpoint import routed
from kvferry.serving.demo.pair import family_model
from kvferry.serving.demo.transfers import Transfer, read_transfer
from kvferry.serving.launch import Fleet, fleet_specs
from kvferry.serving.tiny import tiny_checkpoint
from support.vllm_engine.any_layout import write_plugin
from support.vllm_engine.pair import prompt
from support.vllm_engine.ranks import ARGUMENTS, ENVIRONMENT, ask_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE = (
    "--enforce-eager", "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={64 << 20}",
)  # fmt: skip
LAYER_TOKEN = 2 * 2 * 32 * 4
"""Bytes of a token in one layer over all ranks: heads, K and V, elements, bytes of each."""


@dataclass(frozen=True)
class Ranks:
    """A pair that is served.

    Attributes:
        family: of `kvferry.serving.tiny`.
        prefill, decode: tensor-parallel ranks.
        moved: layers' tokens that move for 300 tokens, in whole cells: what blocks of both sides share.
        blocks: tokens in a block of the prefill and of the decode engine.
        layout: of both, where the backend declares all that its kernels can do; None if it does not.
    """

    family: str
    prefill: int
    decode: int
    moved: int
    blocks: tuple[int, int] = (128, 128)
    layout: str | None = None

    def __str__(self) -> str:
        ends = zip((self.prefill, self.decode), self.blocks, strict=True)
        label = f"{self.family}-" + "-to-".join(f"{ranks}x{tokens}" for ranks, tokens in ends)
        return f"{label}-{self.layout}" if self.layout else label


# 300 tokens are blocks 0 to 2; token 300 sees 237 to 299 through a window of 64: blocks 1 and 2.
QWEN3, GEMMA3 = 4 * 3 * 128, (3 + 5 * 2) * 128
# Halves of those: 0 to 4, and 3 and 4.
QWEN3_HALVES, GEMMA3_HALVES = 4 * 5 * 64, (5 + 5 * 2) * 64
PAIRS = (
    pytest.param(Ranks("gemma3", 1, 2, GEMMA3), id="gemma3-1-to-2"),
    pytest.param(Ranks("gemma3", 2, 1, GEMMA3), id="gemma3-2-to-1", marks=pytest.mark.family),
    *(
        pytest.param(ranks, id=str(ranks), marks=pytest.mark.family)
        for ranks in (
            Ranks("qwen3", 1, 2, QWEN3_HALVES, (128, 64)),
            Ranks("qwen3", 2, 1, QWEN3_HALVES, (64, 128)),
            Ranks("gemma3", 1, 2, GEMMA3_HALVES, (64, 128)),
            Ranks("qwen3", 2, 1, QWEN3, layout="BHLNC"),
            Ranks("gemma3", 1, 2, GEMMA3, layout="BLHNC"),
        )
    ),
)
LATENTS = (
    pytest.param(Ranks("dsv3", 1, 2, 0, (16, 16)), id="dsv3-1-to-2", marks=pytest.mark.family),
    pytest.param(Ranks("dsv3", 2, 1, 0, (16, 16)), id="dsv3-2-to-1", marks=pytest.mark.family),
)


class Served:
    """A fleet behind a router."""

    def __init__(self, ranks: Ranks, fleet: Fleet, url: str, model: str, log: Path) -> None:
        self.ranks, self._model, self._log = ranks, model, log
        self._url, (self.prefill,), (self.decode,) = url, fleet.prefill_urls, fleet.decode_urls
        self._client = httpx.Client(timeout=300, trust_env=False)

    def through(self, text: list[int]) -> tuple[Answer, Transfer | None]:
        """An answer of the pair, and what moved for it."""
        name = f"ranks-{uuid.uuid4().hex}"
        return self._ask(self._url, text, name), read_transfer(self._log, name)

    def alone(self, url: str, text: list[int]) -> Answer:
        """An answer of one engine, from nothing cached."""
        return self._ask(url, text, "alone", cache_salt=uuid.uuid4().hex)

    def _ask(self, url: str, text: list[int], name: str, **more: str) -> Answer:
        body = {"model": self._model, "prompt": text, "max_tokens": 8, "logprobs": 5, **more}
        return ask(self._client, url, body, request_id=name)

    def logged(self) -> list[dict[str, Any]]:
        """Lines of the decode engine's transfer log."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def metrics(self, url: str) -> dict[tuple[str, str], float]:
        """kvferry's metrics of an engine: by name, and labels but for those of all engines."""
        told = self._client.get(f"{url}/metrics").text
        found = re.findall(r"^kvferry_transfer_(\w+?)(?:_total)?{(.*)} (\S+)$", told, re.MULTILINE)
        labels = re.compile(r'\b(group|strategy|outcome)="([^"]*)"')
        return {
            (name, ",".join(v for _, v in labels.findall(of))): float(value)
            for name, of, value in found
            if not name.endswith(("_created", "_bucket"))
        }

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest,
    running: object,
    checkpoints: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    running.close()
    ranks = request.param
    model, folder = str(tiny_checkpoint(ranks.family, checkpoints)), tmp_path_factory.mktemp(str(ranks))
    log = folder / "transfers.jsonl"
    specs = fleet_specs(
        model,
        prefill_tensor_parallel=ranks.prefill,
        decode_tensor_parallel=ranks.decode,
        decode_settings={"transfer_log": str(log)},
        arguments=(*ENGINE, *family_model(ranks.family).arguments, *ARGUMENTS),
    )
    environment = dict(ENVIRONMENT)
    if ranks.layout:
        environment["PYTHONPATH"] += f"{os.pathsep}{write_plugin(folder / 'plugin')}"
    specs = tuple(
        replace(
            spec,
            environment={**spec.environment, **environment},
            arguments=(*spec.arguments, f"--block-size={tokens}"),
        )
        for spec, tokens in zip(specs, ranks.blocks, strict=True)
    )
    with Fleet(specs, folder) as fleet:
        fleet.wait_ready()
        held = {
            layout
            for url in fleet.prefill_urls + fleet.decode_urls
            for layout in ask_ranks(url, "layout_held")
        }
        assert ranks.layout is None or held == {ranks.layout}
        with routed(fleet.prefill_urls, fleet.decode_urls) as url:
            served = Served(ranks, fleet, url, model, log)
            yield served
            served.close()


@pytest.mark.parametrize("served", PAIRS, indirect=True)
def test_every_rank_gets_its_heads_and_the_answer_is_a_single_engines(served: Served) -> None:
    ask_ranks(served.decode, "witness_loads", None)
    for length in (301, 40, 700):
        text = prompt(length, length)
        answer, transfer = served.through(text)
        assert transfer is not None, "nothing was loaded"
        assert transfer.outcome == "ready", transfer.reason
        if length == 301:
            assert transfer.bytes == served.ranks.moved * LAYER_TOKEN
            assert (block_tokens(served.prefill), block_tokens(served.decode)) == served.ranks.blocks
        here: dict[str, list[str]] = {}
        for (load,) in (loads := ask_ranks(served.decode, "witnessed_loads")):
            assert here.keys().isdisjoint(load["digests"]), "a head came to two ranks"
            here |= load["digests"]
        there: dict[str, list[str]] = {}
        told = {name: loads[0][0][name] for name in ("span", "tables")}
        for held in ask_ranks(served.prefill, "digests_held", told):
            there |= held
        assert here == there
        for url in (served.prefill, served.decode):
            assert answer.tokens == served.alone(url, text).tokens


@pytest.mark.parametrize("served", PAIRS[:1], indirect=True)
def test_metrics_are_what_the_log_says_whatever_the_number_of_ranks(served: Served) -> None:
    # A request that is not timed: engines tell of a step in the one after it.
    served.through(prompt(40, 900))
    counted, logged = settled(served), len(served.logged())
    for seed in (901, 902):
        served.through(prompt(300, seed))
    lines = served.logged()[logged:]
    expected: Counter[tuple[str, str]] = Counter({("loads", "ready"): 2, ("seconds_count", ""): 2})
    for line in lines:
        expected["pages", ""] += line["pages"]
        expected["descriptors", ""] += line["descriptors"]
        for group, moved in line["bytes_by_group"].items():
            expected["bytes", f"{group},{line['strategy_by_group'][group]}"] += moved
    now = settled(served)
    grown = {key: value - counted.get(key, 0.0) for key, value in now.items()}
    seconds = grown.pop(("seconds_sum", ""))
    assert seconds == pytest.approx(sum(line["transfer_seconds"] for line in lines))
    assert grown == expected
    assert not any(value for key, value in served.metrics(served.prefill).items() if key[0] == "loads")


def settled(served: Served) -> dict[tuple[str, str], float]:
    """Metrics of the decode engine once they tell of every load that has been logged."""
    deadline = time.monotonic() + 20
    while (found := served.metrics(served.decode)).get(("loads", "ready"), 0) < len(served.logged()):
        assert time.monotonic() < deadline, f"{len(served.logged())} loads were logged, {found} are counted"
        time.sleep(0.1)
    return found


def block_tokens(url: str) -> int:
    """Tokens in a block of an engine, as it tells."""
    told = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(re.search(r'^vllm:cache_config_info{.*?\bblock_size="(\d+)"', told, re.MULTILINE)[1])


@pytest.mark.parametrize("served", LATENTS, indirect=True)
def test_every_rank_gets_all_latents_and_the_answer_depends_on_them(served: Served) -> None:
    for length in (301, 16):
        text = prompt(length, length)
        ask_ranks(served.decode, "witness_loads", None)
        sound, transfer = served.through(text)
        assert transfer is not None, "nothing was loaded"
        assert transfer.outcome == "ready", transfer.reason
        loads = [load for (load,) in ask_ranks(served.decode, "witnessed_loads")]
        held = ask_ranks(served.prefill, "digests_held", {n: loads[0][n] for n in ("span", "tables")})
        assert all(digests == held[0] for digests in (*held, *(load["digests"] for load in loads)))
    # All of the last text is in one block. The engine does not agree with itself: a sound answer is near its
    # own, a spoiled one is not.
    alone = served.alone(served.decode, text)
    ask_ranks(served.decode, "witness_loads", 0)
    spoiled, _ = served.through(text)
    assert apart(spoiled, sound) > 2 * apart(sound, alone)


def apart(one: Answer, other: Answer) -> float:
    """The largest difference of a log probability of the first token, among those that both name."""
    first, second = one.logprobs[0], other.logprobs[0]
    return max(
        (abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=math.inf
    )


@pytest.mark.parametrize("served", PAIRS, indirect=True)
def test_a_rank_whose_load_is_spoiled_changes_the_answer(served: Served) -> None:
    for rank in range(served.ranks.decode):
        text = prompt(100, 500 + rank)
        sound = served.alone(served.prefill, text)
        ask_ranks(served.decode, "witness_loads", rank)
        spoiled, transfer = served.through(text)
        ask_ranks(served.decode, "witness_loads", None)
        assert transfer is not None
        assert transfer.outcome == "ready"
        assert spoiled.logprobs[0] != pytest.approx(sound.logprobs[0], abs=1e-3)
