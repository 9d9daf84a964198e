"""Several connectors in one engine."""

from __future__ import annotations

import re
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from kvferry.observe.metrics import CONNECTOR, EXPOSED
from kvferry.tools.serving.devices import free_ports
from kvferry.tools.serving.engine import EngineSpec
from kvferry.tools.serving.launch import Fleet
from kvferry.tools.serving.role import Role
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from kvferry.tools.top.exposition import parse_page, window
from kvferry.tools.top.figures import compute_figures
from support.vllm_engine.inside import distance
from support.vllm_engine.multi import child, multi
from support.vllm_engine.pair import prompt
from support.vllm_engine.process import Engine
from support.vllm_engine.tiered import chunk_files, spoil

pytestmark = pytest.mark.engine

TEXT = prompt(700, 7)
HOST_BYTES = 64 << 20
HOST = {"type": "host", "capacity": HOST_BYTES}


class Two:
    """An engine with two of kvferry's own: one keeps in memory, the other in a directory."""

    def __init__(
        self, folder: Path, checkpoints: Path, family: str = "gemma3", policy: str = "weight", **options: Any
    ) -> None:
        self.chunks = folder / "chunks"
        self.chunks.mkdir()
        disk = {"type": "file", "path": str(self.chunks), "capacity": "256MiB"}
        connectors = multi(
            {**child(tiers=[HOST], chunk_tokens=64), "name": "memory"},
            {**child(tiers=[HOST, disk], chunk_tokens=64), "name": "disk"},
            source_policy=policy,
        )
        self.engine = Engine(
            folder / "log",
            model=str(tiny_checkpoint(family, checkpoints)),
            kv_transfer_config=connectors,
            disable_log_stats=False,
            block_size=64,
            **FAMILIES[family].engine_options(),
            **options,
        )
        try:
            self.engine.ready(500.0)
        except BaseException:
            self.engine.close()
            raise
        self.engine.call("chosen")

    def say(self, text: list[int]) -> dict[str, Any]:
        """The engine's answer, with what it loaded for it; everything it stores is stored."""
        assert self.engine.call("reset_prefix_cache")
        (answer,) = self.engine.call("generate", [text])
        for each in (0, 1):
            self.engine.call("settle_tiers", of=each)
        answer["loaded"] = self.engine.call("chosen")
        return answer


@pytest.fixture(scope="module")
def two(running: object, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    running.close()
    started = Two(tmp_path_factory.mktemp("two"), checkpoints)
    yield started
    started.engine.close()


def test_both_connectors_store_and_either_serves(two: Two) -> None:
    cold = two.say(TEXT)
    assert cold["loaded"] == []
    for name in ("memory", "disk"):

        def ask(name: str = name) -> dict[str, Any]:
            if name == "disk":
                two.engine.call("forget_host_memory", of=0)  # what the other gave was stored there again
            answer = two.say(TEXT)
            assert answer["loaded"] == [(name, len(TEXT))]
            return answer

        warm = ask()
        assert warm["tokens"] == cold["tokens"]
        assert distance(warm, cold) < 1e-4
        two.engine.call("spoil_child", name)
        assert distance(ask(), cold) > 1e-2, "what was loaded was not looked at"
        two.engine.call("spoil_child", None)
    assert two.engine.call("still_known") == {}
    for each in (0, 1):
        assert two.engine.call("held", of=each) == {}


def test_metrics_of_both_connectors_are_told_apart(two: Two) -> None:
    before = two.engine.call("metrics", "kvferry_")
    two.say(prompt(300, 8))
    two.say(prompt(300, 8))
    after = two.engine.call("metrics", "kvferry_")
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    assert more["kvferry_multi_hit_tokens_total memory"] == 300
    assert more["kvferry_hit_tokens_total memory tiers host"] == 300
    assert more["kvferry_multi_misses_total memory"] == more["kvferry_multi_misses_total disk"] == 1
    assert more["kvferry_multi_passed_over_total disk"] == 1
    assert not more.get("kvferry_hit_tokens_total disk tiers file")
    assert more["kvferry_tier_stored_chunks_total memory host"] > 0
    assert more["kvferry_tier_stored_chunks_total disk file"] > 0
    for name in ("memory", "disk"):
        capacity = after[f"kvferry_tier_capacity_bytes {name} host"]
        assert HOST_BYTES * 3 / 4 < capacity <= HOST_BYTES, "it takes another size than was asked for"


def test_explanation_names_a_load_by_the_other_connector(two: Two) -> None:
    text = prompt(300, 10)
    two.say(text)
    two.engine.call("forget_host_memory", of=0)
    assert two.say(text)["loaded"] == [("disk", 300)]
    told = two.engine.call("story_of_last", of=0)
    at = told.index("Another connector of the engine loaded 299 tokens.")
    assert told[at + 1] == "Scheduled: 299 tokens cached, 1 to compute."
    assert not any("nother connector" in line for line in two.engine.call("story_of_last", of=1))


def test_reset_reaches_both_connectors(two: Two) -> None:
    text = prompt(300, 9)
    cold, warm = two.say(text), two.say(text)
    assert warm["loaded"] == [("memory", len(text))]
    assert two.engine.call("reset_all")
    after = two.say(text)
    assert after["loaded"] == []
    assert distance(after, cold) < 1e-4


@pytest.mark.long
def test_slow_connector_delays_no_request(two: Two) -> None:
    """Neither one of which the other child has some, nor one that is computed sooner than it answers."""
    late, text = 6.0, prompt(700, 12)
    longer, new = text + prompt(200, 13), prompt(600, 14)
    two.say(text)
    answers = []
    two.engine.call("slow_answers", late, of=1)
    try:
        for asked, loaded in ((longer, [("memory", 640)]), (new, [])):
            before, began = two.engine.call("metrics", "kvferry_multi_misses"), time.monotonic()
            answers.append(two.say(asked))
            took = time.monotonic() - began
            after = two.engine.call("metrics", "kvferry_multi_misses")
            assert answers[-1]["loaded"] == loaded
            assert took < late / 2, "it was waited for"
            name = "kvferry_multi_misses_total disk"
            assert after[name] == before[name] + 1, "it was not looking"
    finally:
        two.engine.call("slow_answers", 0.0, of=1)
    assert two.engine.call("reset_all")
    cold = two.say(longer)
    assert cold["loaded"] == []
    assert distance(answers[0], cold) < 1e-4


@pytest.mark.long
def test_preempted_requests_load_again_from_either_connector(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    texts = [prompt(n, n) for n in (620, 624, 628, 632, 636)]
    # Ten blocks of each prompt, the null block, and one of the five that their answers need.
    two = Two(tmp_path, checkpoints, "qwen3", num_gpu_blocks_override=52)
    try:
        references = []
        for text in texts:
            assert two.engine.call("reset_prefix_cache")
            references += two.engine.call("generate", [text], tokens=40)
            for each in (0, 1):
                two.engine.call("settle_tiers", of=each)
        for name in ("memory", "disk"):
            if name == "disk":
                two.engine.call("forget_host_memory", of=0)
            assert two.engine.call("reset_prefix_cache")
            before = two.engine.call("preemptions")
            two.engine.call("chosen")
            answers = two.engine.call("generate", texts, tokens=40)
            assert two.engine.call("preemptions") > before, "the pool was large enough: nothing was shown"
            loads = two.engine.call("chosen")
            assert {source for source, _ in loads} >= {name}
            assert len(loads) > len(texts), "no preempted request loaded again"
            for answer, reference in zip(answers, references, strict=True):
                assert answer["tokens"] == reference["tokens"]
                assert distance(answer, reference) < 1e-4
            for each in (0, 1):
                two.engine.call("settle_tiers", of=each)
                assert two.engine.call("held", of=each) == {}
            assert two.engine.call("still_known") == {}
    finally:
        two.engine.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_cheaper_connector_loads_or_none_does_on_two_ranks(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    two = Two(tmp_path, checkpoints, "qwen3", "cost", tensor_parallel_size=2)
    text, said = prompt(512, 11), list[dict[str, Any]]()

    def ask(*, memory: bool = False) -> list[tuple[str, int]]:
        if not memory:
            for each in (0, 1):
                two.engine.call("forget_host_memory", of=each)
        said.append(two.say(text))
        return said[-1]["loaded"]

    try:
        two.engine.call("slow_prompts", 0.3)  # a tiny model computes as fast as memory gives
        assert ask() == []
        assert ask(memory=True) == [("memory", 512)], "both are to be tried, the first is first"
        assert ask() == [("disk", 512)], "the other has nothing any more"
        two.engine.call("forget_speeds")
        two.engine.call("slow_files", 4.0, of=1)
        assert ask() == [("disk", 512)]
        assert ask() == [], "computing is faster than such a disk"
        assert ask(memory=True) == [("memory", 512)]
        cold, *others = said
        for answer in others:
            assert answer["tokens"] == cold["tokens"]
            assert distance(answer, cold) < 1e-4
        for paths in chunk_files(two.chunks).values():
            for path in paths:
                spoil(path, with_checksum=True)
        two.engine.call("forget_speeds")
        assert ask() == [("disk", 512)]
        assert distance(said[-1], cold) > 1e-2, "what was loaded was not looked at"
        assert two.engine.call("still_known") == {}
        for each in (0, 1):
            assert two.engine.call("held", of=each) == {}
    finally:
        two.engine.close()


@pytest.mark.long
def test_synchronous_connector_is_a_child_like_others(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    storage = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")}}
    example = {"kv_connector": "ExampleConnector", "load_weight": 2, **storage}
    engine = Engine(
        tmp_path / "log",
        model=str(tiny_checkpoint("qwen3", checkpoints)),
        kv_transfer_config=multi(example, child(tiers=[HOST])),
        disable_hybrid_kv_cache_manager=True,
        **FAMILIES["qwen3"].engine_options(),
    )
    try:
        engine.ready()
        files = tmp_path / "files"

        def say() -> dict[str, Any]:
            engine.call("chosen")
            (answer,) = engine.call("generate", [TEXT])
            answer["loaded"] = engine.call("chosen")
            engine.call("settle_tiers")
            assert engine.call("reset_prefix_cache")
            return answer

        cold = say()
        assert cold["loaded"] == []
        kept = engine.call("tier_counts")["stored"]
        assert kept > 0
        engine.call("forget_host_memory")
        warm = say()
        assert warm["loaded"] == [("ExampleConnector", 640)]
        told = engine.call("story_of_last")
        assert "Another connector of the engine loaded 640 tokens." in told
        assert "Scheduled: 640 tokens cached, 60 to compute." in told
        assert warm["tokens"] == cold["tokens"]
        assert distance(warm, cold) < 1e-4
        assert engine.call("tier_counts")["stored"] == kept, "what may have failed to load was stored"
        for path in files.rglob("*.safetensors"):
            save_file({name: -tensor for name, tensor in load_file(path).items()}, path)
        assert distance(say(), cold) > 1e-2, "what was loaded was not looked at"
        shutil.rmtree(files)
        assert say()["loaded"] == []
        shutil.rmtree(files)
        again = say()
        assert again["loaded"] == [("KVFerryConnector", 700)]
        assert distance(again, cold) < 1e-4
        assert engine.call("still_known") == {}
    finally:
        engine.close()


def named(*children: dict[str, Any]) -> list[dict[str, Any]]:
    """Children without the module that has them."""
    return [{k: v for k, v in one.items() if k != "kv_connector_module_path"} for one in children]


ROLE = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
MEMORY = named(child(tiers=[HOST], chunk_tokens=64))


@pytest.mark.long
@pytest.mark.parametrize(
    ("parent", "children", "found"),
    [
        (
            "FerryMultiConnector",
            [{**MEMORY[0], "name": "one"}, {**MEMORY[0], "name": "two"}],
            [
                ("kvferry_multi_hit_tokens_total", 'connector="one"'),
                ("kvferry_hit_tokens_total", 'connector="one"'),
                ("kvferry_tier_stored_chunks_total", 'connector="two"'),
            ],
        ),
        ("MultiConnector", [{**MEMORY[0], **ROLE}], [("kvferry_hit_tokens_total", "")]),
    ],
)
def test_server_finds_connectors_by_name_and_shows_their_metrics(
    running: object, checkpoints: Path, tmp_path: Path, parent: str, children: list, found: list
) -> None:
    """The entry point is read from a distribution that is made here, as an installer would make it."""
    running.close()
    root = Path(__file__).parents[2]
    plugins = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in of.items()) for group, of in plugins.items()]
    info = tmp_path / "site" / "kvferry_names-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-names\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    spec = EngineSpec(
        name="engine",
        role=Role.BOTH,
        model=str(tiny_checkpoint("qwen3", checkpoints)),
        port=free_ports(1)[0],
        kv_transfer={
            "kv_connector": parent,
            **ROLE,
            "kv_connector_extra_config": {"connectors": children},
        },
        arguments=("--enforce-eager", "--max-model-len", "1024", "--dtype", "float32", "--block-size", "64"),
        environment={
            "PYTHONPATH": f"{tmp_path / 'site'}:{root / 'src'}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )
    with Fleet([spec], tmp_path / "logs") as fleet:
        fleet.wait_ready()
        body = {"model": spec.model, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
        answers = []
        for _ in range(2):
            answer = httpx.post(f"{spec.url}/v1/completions", json=body, timeout=60.0)
            answers.append(answer.raise_for_status().json()["choices"][0]["text"])
            httpx.post(f"{spec.url}/reset_prefix_cache", timeout=60.0).raise_for_status()
        shown = httpx.get(f"{spec.url}/metrics", timeout=60.0).text
    assert answers[0] == answers[1]
    for name, label in found:
        (value,) = [
            float(line.split()[-1])
            for line in shown.splitlines()
            if line.startswith(name + "{") and label in line
        ]
        assert value > 0, name
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", shown, re.MULTILINE))
    asked = {name: str(metric.kind) for name, metric in EXPOSED.items() if CONNECTOR in metric.labels}
    if parent == "FerryMultiConnector":
        assert {name: kinds.get(name) for name in asked} == asked, "top and the dashboard ask for these"
        found = compute_figures([window(None, parse_page(shown, 0.0), "0")]).totals.connectors
        assert {name: one.hits for name, one in found.items()} == {"one": 1, "two": 0}
