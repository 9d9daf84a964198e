"""Engines of other tensor parallelism and block size, served: every rank gets its heads, and only those."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.tools.serving.demo.client import StreamedAnswer, ask, routed
from kvferry.tools.serving.demo.pair import family_model
from kvferry.tools.serving.demo.report import Transfer, read_transfer
from kvferry.tools.serving.launch import Fleet, fleet_specs
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from kvferry.tools.serving.tiny import tiny_checkpoint
from support.clients import engine_client
from support.vllm_engine import any_layout, copied, no_amx, standstill
from support.vllm_engine.pair import prompt
from support.vllm_engine.plugins import with_plugins
from support.vllm_engine.ranks import ARGUMENTS, ENVIRONMENT, ask_ranks
from support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE = (
    "--enforce-eager", "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=4",
    f"--kv-cache-memory-bytes={64 << 20}",
)  # fmt: skip
LAYER_TOKEN = 2 * 2 * 32 * 4
"""Bytes of a token in one layer over all ranks: heads, K and V, elements, bytes of each."""
DEADLINE = 2.0
"""Seconds of a load of engines with tiers."""


@dataclass(frozen=True)
class Ranks:
    """A pair that is served.

    Attributes:
        family: of `kvferry.tools.serving.tiny`.
        prefill, decode: tensor-parallel ranks.
        moved: layers' tokens that move for 300 tokens, in whole cells: what blocks of both sides share.
        blocks: tokens in a block of the prefill and of the decode engine.
        layout: of both, where the backend declares all that its kernels can do; None if it does not.
        copied: layers of which each head is on two ranks of the engine with more of them.
        tiers: the decode engine keeps chunks of 128 tokens in host memory, of which there is little, and
            files.
    """

    family: str
    prefill: int
    decode: int
    moved: int
    blocks: tuple[int, int] = (128, 128)
    layout: str | None = None
    copied: str | None = None
    tiers: bool = False

    def __str__(self) -> str:
        ends = zip((self.prefill, self.decode), self.blocks, strict=True)
        label = f"{self.family}-" + "-to-".join(f"{ranks}x{tokens}" for ranks, tokens in ends)
        return f"{label}-{self.layout}" if self.layout else label


# 300 tokens are blocks 0 to 2; token 300 sees 237 to 299 through a window of 64: blocks 1 and 2.
QWEN3, GEMMA3 = 4 * 3 * 128, (3 + 5 * 2) * 128
# The fourth layer sees everything; its one head, as wide as both of the others', goes to both ranks.
GEMMA4, GEMMA4_ONCE = (2 * 3 + 3 * 2) * 128, (3 + 3 * 2) * 128
# Halves of those: 0 to 4, and 3 and 4.
QWEN3_HALVES, GEMMA3_HALVES = 4 * 5 * 64, (5 + 5 * 2) * 64
# Heads of 64 elements in place of 32. Two layers see everything, two a window. Of chunks of 384 tokens,
# which three of Llama 4's layers attend to, 300 tokens are in the first.
GPTOSS, LLAMA4 = 2 * (2 * 3 + 2 * 2) * 128, 4 * 3 * 128
PAIRS = (
    pytest.param(Ranks("gemma3", 1, 2, GEMMA3, tiers=True), id="gemma3-1-to-2"),
    pytest.param(Ranks("gemma3", 2, 1, GEMMA3), id="gemma3-2-to-1", marks=pytest.mark.long),
    *(
        pytest.param(ranks, id=str(ranks), marks=pytest.mark.long)
        for ranks in (
            Ranks("qwen3", 1, 4, 2 * QWEN3_HALVES, (128, 64), copied="layers."),
            Ranks("qwen3", 2, 1, QWEN3_HALVES, (64, 128)),
            Ranks("qwen3", 4, 1, QWEN3, copied="layers."),
            Ranks("gemma3", 1, 2, GEMMA3_HALVES, (64, 128)),
            Ranks("qwen3", 2, 1, QWEN3, layout="BHLNC"),
            Ranks("gemma3", 1, 2, GEMMA3, layout="BLHNC"),
            Ranks("gemma4", 1, 2, GEMMA4, copied="layers.3."),
            Ranks("gemma4", 2, 1, GEMMA4_ONCE, copied="layers.3."),
            Ranks("gptoss", 1, 2, GPTOSS),
            Ranks("gptoss", 2, 1, GPTOSS),
            Ranks("llama4", 1, 2, LLAMA4),
            Ranks("llama4", 2, 1, LLAMA4),
            Ranks("gemma3", 2, 2, GEMMA3),
        )
    ),
)
LATENTS = (
    pytest.param(Ranks("dsv3", 1, 2, 0, (16, 16)), id="dsv3-1-to-2", marks=pytest.mark.long),
    pytest.param(Ranks("dsv3", 2, 1, 0, (16, 16)), id="dsv3-2-to-1", marks=pytest.mark.long),
)


class Served:
    """A fleet behind a router."""

    def __init__(self, ranks: Ranks, fleet: Fleet, url: str, model: str, log: Path) -> None:
        self.ranks, self._model, self._log = ranks, model, log
        self._url, (self.prefill,), (self.decode,) = url, fleet.prefill_urls, fleet.decode_urls
        self._client = engine_client(300)

    def through(self, text: list[int]) -> tuple[StreamedAnswer, Transfer | None]:
        """An answer of the pair, and what moved for it."""
        name = f"ranks-{uuid.uuid4().hex}"
        return self._ask(self._url, text, name), read_transfer(self._log, name)

    def alone(self, url: str, text: list[int]) -> StreamedAnswer:
        """An answer of one engine, from nothing cached."""
        return self._ask(url, text, "alone", cache_salt=uuid.uuid4().hex)

    def _ask(self, url: str, text: list[int], name: str, **more: Any) -> StreamedAnswer:
        body = {"model": self._model, "prompt": text, "max_tokens": 8, "logprobs": 5, **more}
        return ask(self._client, url, body, request_id=name)

    def logged(self) -> list[dict[str, Any]]:
        """Lines of the decode engine's transfer log."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def metrics(self, url: str) -> Counter[str]:
        """kvferry's metrics of an engine: by name and the values of their labels, in order of their names."""
        told = self._client.get(f"{url}/metrics").text
        found: Counter[str] = Counter()
        for name, labels, value in re.findall(r"^kvferry_(\w+){(.*)} (\S+)$", told, re.MULTILINE):
            of = [
                v
                for label, v in re.findall(r'(\w+)="([^"]*)"', labels)
                if label not in ("engine", "model_name")
            ]
            if not name.endswith(("_created", "_bucket")):
                found[" ".join([name, *of])] = float(value)
        return found

    def sources(self) -> Counter[str]:
        """Prompt tokens of the decode engine by where vLLM says they came from."""
        told = self._client.get(f"{self.decode}/metrics").text
        line = r'^vllm:prompt_tokens_by_source_total{.*\bsource="(\w+)".*} (\S+)$'
        return Counter({name: float(count) for name, count in re.findall(line, told, re.MULTILINE)})

    def forget(self) -> None:
        """Let the decode engine forget its own prefix cache; tiers keep what they have."""
        self._client.post(f"{self.decode}/reset_prefix_cache").raise_for_status()

    def straight(self, text: list[int], **more: Any) -> StreamedAnswer:
        """An answer of the decode engine, of which the router does not hear."""
        return self._ask(self.decode, text, f"straight-{uuid.uuid4().hex}", **more)

    def offer(self, text: list[int]) -> dict[str, Any]:
        """The prefill engine has computed a prompt, and keeps it for another."""
        body = {"model": self._model, "prompt": text, "max_tokens": 1, "kv_transfer_params": ASK_FOR_KV}
        answer = self._client.post(f"{self.prefill}/v1/completions", json=body).raise_for_status()
        return {"kv_transfer_params": answer.json()["kv_transfer_params"]}

    def leave(self, text: list[int], seconds: float, **more: Any) -> None:
        """Ask the decode engine, and go away while it still loads."""
        body = {"model": self._model, "prompt": text, "max_tokens": 8, **more}
        with pytest.raises(httpx.ReadTimeout):
            self._client.post(f"{self.decode}/v1/completions", json=body, timeout=seconds)

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Reads of the decode engine stand still: of peers, or of files."""
        file = self._log.parent / what
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def chunks(self) -> list[Path]:
        """Files of chunks that the decode engine's tiers have."""
        return list((self._log.parent / "chunks").rglob("*.kv"))

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
        decode_settings={"transfer_log": str(log), **(tiers_in(folder) if ranks.tiers else {})},
        arguments=(*ENGINE, *family_model(ranks.family).arguments, *ARGUMENTS),
    )
    plugins = [copied, no_amx, standstill, *([any_layout] if ranks.layout else [])]
    environment = ENVIRONMENT | with_plugins(folder / "plugins", *plugins)
    environment[standstill.FOLDER] = str(folder)
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
def test_every_rank_loads_its_heads_and_the_answer_equals_a_single_engines(served: Served) -> None:
    ask_ranks(served.decode, "witness_loads", None)
    for length in (301, 40, 700):
        for again in range(3):
            text = prompt(length, length + again)
            answer, transfer = served.through(text)
            assert transfer is not None, "nothing was loaded"
            # Three ranks on two cores: Linux 6.18 may not let an engine run until the other's lease is over.
            if transfer.outcome != "expired":
                break
            ask_ranks(served.decode, "witnessed_loads")
        assert transfer.outcome == "ready", transfer.reason
        if length == 301:
            assert transfer.bytes == served.ranks.moved * LAYER_TOKEN
            assert (block_tokens(served.prefill), block_tokens(served.decode)) == served.ranks.blocks
        here: dict[str, list[str]] = {}
        copies = Counter[str]()
        for (load,) in (loads := ask_ranks(served.decode, "witnessed_loads")):
            both = here.keys() & load["digests"].keys()
            assert all(here[name] == load["digests"][name] for name in both), "copies of a head differ"
            copies.update(load["digests"].keys())
            here |= load["digests"]
        copied = served.ranks.copied if served.ranks.decode > 1 else None
        assert all(count == 1 + bool(copied and copied in name) for name, count in copies.items())
        there: dict[str, list[list[str]]] = {}
        told = {name: loads[0][0][name] for name in ("span", "tables")}
        for held in ask_ranks(served.prefill, "digests_held", told):
            for name, digests in held.items():
                there.setdefault(name, []).append(digests)
        assert here.keys() == there.keys()
        # Ranks of the prefill engine with the same head may round differently; one of them was read.
        others = {name: there[name] for name in here if here[name] not in there[name]}
        assert not others, {name: (here[name], copies) for name, copies in others.items()}
        for url in (served.prefill, served.decode):
            assert answer.tokens == served.alone(url, text).tokens


@pytest.mark.parametrize("served", PAIRS[:1], indirect=True)
def test_metrics_of_a_transfer_equal_the_log_on_two_ranks(served: Served) -> None:
    before, leased = quiet(served, served.decode), quiet(served, served.prefill)
    logged = len(served.logged())
    for seed in (901, 902):
        served.through(prompt(301, seed))
    lines = served.logged()[logged:]
    expected: Counter[str] = Counter(
        {
            "queries_total peer": 2,
            "hits_total peer": 2,
            "loads_total ready peer": 2,
            "load_seconds_count peer": 2,
            "tickets_total hit": 2,
        }
    )
    # The log's order of labels is the alphabet's: tier after source, outcome before it.
    expected["hit_tokens_total peer peer"] = sum(line["tokens"] for line in lines)
    expected |= {f"transfer_seconds_count {stage}": 2 for stage in ("plan", "read", "check")}
    for line in lines:
        expected["transfer_pages_total"] += line["pages"]
        expected["transfer_descriptors_total"] += line["descriptors"]
        for group, moved in line["bytes_by_group"].items():
            expected[f"load_bytes_total {group} peer {line['strategy_by_group'][group]}"] += moved
    grown = quiet(served, served.decode) - before
    for stage in ("plan", "transfer", "check"):
        seconds = grown.pop(f"transfer_seconds_sum {'read' if stage == 'transfer' else stage}")
        assert seconds == pytest.approx(sum(line[f"{stage}_seconds"] for line in lines), abs=1e-5)
    waited = grown.pop("load_seconds_sum peer")
    moving = sum(line[f"{stage}_seconds"] for stage in ("plan", "transfer", "check") for line in lines)
    # The log is written after it was counted, and by the same clock.
    assert moving < waited < sum(line["total_seconds"] for line in lines) + 1e-5
    # What the tiers had to say to it: two queries that came to nothing, as the chunks were new to them.
    assert grown.pop("queries_total tiers") == 2
    assert grown.pop("misses_total several not_stored tiers") == 2
    assert {name: n for name, n in grown.items() if not name.startswith("tier_")} == expected
    of_leases = quiet(served, served.prefill) - leased
    assert of_leases == {"leases_granted_total": 2, "leases_ended_total released": 2}


@pytest.mark.parametrize("served", PAIRS[:1], indirect=True)
def test_metrics_of_tiers_count_stores_and_loads_on_two_ranks(served: Served) -> None:
    text = prompt(300, 903)
    before, files = quiet(served, served.decode), len(served.chunks())
    served.straight(text)
    stored, now_files = quiet(served, served.decode), len(served.chunks())
    grown = stored - before
    assert grown["queries_total tiers"] == 1
    assert grown["misses_total several not_stored tiers"] == 1
    # Two chunks and a tail of 44 tokens, of full attention and of the window.
    assert grown["tier_stored_chunks_total host"] == grown["tier_stored_chunks_total file"] == 6
    assert grown["tier_store_seconds_count file"] == now_files - files == 6
    assert (
        grown["tier_stored_bytes_total file"]
        == stored["tier_used_bytes file"] - before["tier_used_bytes file"]
    )
    assert not any(name.startswith(("hit", "load", "transfer")) for name in grown)
    served.forget()
    served.straight(text)
    grown = quiet(served, served.decode) - stored
    seconds = grown.pop("load_seconds_sum tiers"), grown.pop("tier_fetch_seconds_sum host")
    assert all(0 < each < 30 for each in seconds)
    assert grown == {
        "queries_total tiers": 1,
        "hits_total tiers": 1,
        "hit_tokens_total tiers host": 300,
        "loads_total ready tiers": 1,
        "load_seconds_count tiers": 1,
        # In whole blocks: one layer's three, and of five layers the two that the window looks at.
        "load_bytes_total 0 full_attention tiers copied": 3 * 128 * LAYER_TOKEN,
        "load_bytes_total 1 sliding_window(64) tiers copied": 5 * 2 * 128 * LAYER_TOKEN,
        "tier_fetched_chunks_total host": 5,
        "tier_fetch_seconds_count host": grown["tier_fetch_seconds_count host"],
    }
    before = quiet(served, served.decode)
    served.straight(text[:40])
    served.straight(text[:290])
    grown = quiet(served, served.decode) - before
    assert {name: n for name, n in grown.items() if not name.startswith("tier_")} == {
        "queries_total tiers": 2,
        "misses_total  short_prompt tiers": 1,
        "misses_total  local tiers": 1,
    }


@pytest.mark.parametrize("served", PAIRS[:1], indirect=True)
def test_stalled_read_expires_on_an_otherwise_idle_engine(
    served: Served,
) -> None:
    """The engine steps by itself or not at all: nobody asks it anything else."""
    served.through(prompt(40, 910))  # they have met
    text, left = prompt(300, 911), prompt(300, 912)
    reference = served.alone(served.prefill, text)
    offers = served.offer(text), served.offer(left)
    before, sources = quiet(served, served.decode), served.sources()
    with served.held(standstill.PEERS):
        served.leave(left, 1.0, **offers[1])
        wait_for(lambda: served.metrics(served.decode)["loads_total dropped peer"] > 0)
        answer = served.straight(text, **offers[0])
        assert served.metrics(served.decode)["late_blocks"] > 0
    assert answer.tokens == reference.tokens
    assert served.sources() - sources == {"local_compute": len(text)}, "what did not arrive counts as loaded"

    def landed() -> bool:
        """Once the engine has something to do again, it sees so."""
        served.straight(prompt(10, 913))
        return not served.metrics(served.decode)["late_blocks"]

    wait_for(landed)
    grown = quiet(served, served.decode) - before
    assert grown["loads_total expired peer"] == grown["misses_total  deadline peer"] == 1
    assert grown["loads_total dropped peer"] == 1


@pytest.mark.long
@pytest.mark.parametrize("served", PAIRS[:1], indirect=True)
def test_hanging_tier_expires_on_an_otherwise_idle_engine(
    served: Served,
) -> None:
    text = prompt(300, 920)
    first = served.straight(text)
    quiet(served, served.decode)
    for number in range(10):
        served.straight(prompt(900, 921 + number))  # host memory has no room for all, even without windows
    before, sources = quiet(served, served.decode), served.sources()
    served.forget()
    with served.held(standstill.FILES):
        answer = served.straight(text)
    assert answer.tokens == first.tokens
    assert served.sources() - sources == {"local_compute": len(text)}, "what did not arrive counts as loaded"
    grown = quiet(served, served.decode) - before
    assert grown["loads_total expired tiers"] == grown["misses_total  deadline tiers"] == 1


def quiet(served: Served, url: str) -> Counter[str]:
    """Metrics of an engine once nothing is under way and they change no more; no gauge is negative."""
    last, since = served.metrics(url), time.monotonic()

    def at_rest() -> bool:
        nonlocal last, since
        found = served.metrics(url)
        assert min(found.values(), default=0) >= 0
        if found != last:
            last, since = found, time.monotonic()
        # A page shows a step's counts only when the step's output has been taken.
        return time.monotonic() - since > SETTLED_SECONDS and not any(found[name] for name in UNDER_WAY)

    wait_for(at_rest)
    assert_adds_up(last)
    return last


SETTLED_SECONDS = 0.3
UNDER_WAY = ("pending_loads peer", "pending_loads tiers", "tier_owed_chunks file", "leases", "late_blocks")


def assert_adds_up(found: Counter[str]) -> None:
    """Every query has come to one end."""
    for source in ("peer", "tiers"):
        missed = sum(n for name, n in found.items() if name.startswith("misses_") and name.endswith(source))
        assert found[f"queries_total {source}"] == found[f"hits_total {source}"] + missed


def tiers_in(folder: Path) -> dict[str, Any]:
    """Settings of an engine with host memory and a directory."""
    (folder / "chunks").mkdir()
    tiers = [
        {"type": "host", "capacity": "8MiB"},
        {"type": "file", "path": str(folder / "chunks"), "capacity": "256MiB"},
    ]
    return {"tiers": tiers, "transfer": True, "chunk_tokens": 128, "load_timeout_seconds": DEADLINE}


def block_tokens(url: str) -> int:
    """Tokens in a block of an engine, as it tells."""
    told = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(re.search(r'^vllm:cache_config_info{.*?\bblock_size="(\d+)"', told, re.MULTILINE)[1])


@pytest.mark.parametrize("served", LATENTS, indirect=True)
def test_every_rank_loads_all_latents_and_the_answer_depends_on_them(served: Served) -> None:
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


def apart(one: StreamedAnswer, other: StreamedAnswer) -> float:
    """The largest difference of a log probability of the first token, among those that both name."""
    first, second = one.logprobs[0], other.logprobs[0]
    return max(
        (abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=math.inf
    )


@pytest.mark.parametrize("served", PAIRS, indirect=True)
def test_spoiled_load_of_any_rank_changes_the_answer(served: Served) -> None:
    for rank in range(served.ranks.decode):
        text = prompt(100, 500 + rank)
        sound = served.alone(served.prefill, text)
        ask_ranks(served.decode, "witness_loads", rank)
        spoiled, transfer = served.through(text)
        ask_ranks(served.decode, "witness_loads", None)
        assert transfer is not None
        assert transfer.outcome == "ready"
        assert spoiled.logprobs[0] != pytest.approx(sound.logprobs[0], abs=1e-3)
