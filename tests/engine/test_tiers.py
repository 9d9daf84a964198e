"""Every family with tiers: cold, warm, after a restart, from an engine of another block size; and spoiled."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvferry.keys import ChunkKeys
from kvferry.tools.replay.trace.open import open_trace
from support.kv_events import Router, endpoint, publishing
from support.replayed import found_by_engine, found_in_replay, model_of_engine, replay_of
from support.vllm_engine.checkpoints import checkpoint_of
from support.vllm_engine.inside import distance
from support.vllm_engine.lengths import limit_admissions, of_each_length
from support.vllm_engine.marks import engines, with_second_runner
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered, chunk_files, spoil
from support.waiting import wait_for


@dataclass(frozen=True)
class Family:
    """A family, and engines that keep and find its chunks.

    Attributes:
        name: of `kvferry.tools.serving.tiny`.
        ends: where a prefix of a text of 700 tokens ends: in it, or at its last snapshot.
        options: of both engines.
        other: of the one that comes later.
        settings: of both connectors.
        other_ends: where a prefix of a text of 512 tokens ends that the later engine kept.
        exact: the engine agrees with itself however a prompt is cut.
    """

    name: str
    ends: int
    options: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    other_ends: int = 512
    exact: bool = True

    def __str__(self) -> str:
        return self.name


SMALL = {"block_size": 64}
BF16 = {"enable_prefix_caching": True, "dtype": "bfloat16"}
EVERY = "prefix_cache_retention_interval"
"""How often vLLM keeps a snapshot, besides the last one that a prompt can be continued from."""
ASYNC = {"async_scheduling": True}
# The pages of DeepSeek V4 move whole, so no engine with other blocks reads its chunks.
REPRESENTATIVE = (
    Family("gemma3", 700, other=SMALL),
    *with_second_runner(Family("dsv4", 700, exact=False)),
)
ALL = (
    Family("lfm2", 640, {EVERY: 128, **ASYNC}, other=SMALL, settings={"chunk_tokens": 64}, exact=False),
    Family("gemma4", 700, other=SMALL),
    Family("gptoss", 700, ASYNC, other=SMALL, exact=False),
    Family("llama4", 700, other=SMALL),
    Family("dsv3", 700, exact=False),
    *(
        Family(
            name,
            512,
            {EVERY: 256, "mamba_ssm_cache_dtype": "float32", **ASYNC},
            other={"block_size": 16, EVERY: 160},
            settings={"chunk_tokens": 32},
            other_ends=480,
            exact=False,
        )
        for name in ("qwen3next", "qwen3_5")
    ),
    Family("nemotronh", 512, {**BF16, EVERY: 256}, exact=False),
)
TEXT = prompt(512, 21)
"""Ends where chunks, blocks and steps end."""
AT_HAND = [len(TEXT)], [len(TEXT) + 1]
"""Of the text and one token more: without it at first, with it once it has been a prompt, without states."""
LONG = prompt(700, 22)

pytestmark = engines("family", REPRESENTATIVE, ALL)


class Life:
    """The engines of one family, one after the other, on one directory."""

    def __init__(self, family: Family, checkpoints: Path, folder: Path) -> None:
        self.family, self.directory = family, folder / "chunks"
        self.recording = folder / "trace.jsonl"
        self.checkpoint = checkpoint_of(family.name, checkpoints)
        self._checkpoints, self._folder = checkpoints, folder
        self._engines = 0
        self.events = endpoint(folder)
        self.engine = self._start(family.options)
        self.asked, self.reference = self.engine.own_words(TEXT)
        self.long = self.engine.say(LONG)

    def restart(self, *, fresh: bool, **other: Any) -> None:
        self.engine.close()
        self.engine = self._start({**self.family.options, **other}, fresh=fresh)

    def close(self) -> None:
        self.engine.close()

    def _start(self, options: dict[str, Any], *, fresh: bool = False) -> Tiered:
        self._engines += 1
        log = self._folder / f"{self._engines}.log"
        options = {**options, "kv_events_config": publishing(self._folder)}
        settings = {**self.family.settings, "record": str(self.recording)}
        told = (self.family.name, self._checkpoints, self.directory, log, options, settings)
        return Tiered(*told, fresh=fresh)


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Life]:
    life = Life(request.param, checkpoints, tmp_path_factory.mktemp(str(request.param)))
    yield life
    life.close()


def same_words(life: Life, source: str) -> None:
    """The engine says what it said, to the last bit, and has it from there."""
    before = life.engine.engine.call("tier_counts")["fetched"].get(source, 0)
    answer = life.engine.say(life.asked)
    assert answer["hit"] in AT_HAND
    assert distance(answer, life.reference) == 0.0
    assert life.engine.engine.call("tier_counts")["fetched"][source] > before


def test_prompt_is_loaded_from_host_memory(family: Life) -> None:
    family.engine.forget()
    same_words(family, "host")


def test_prompt_is_loaded_from_files(family: Life) -> None:
    family.engine.forget(host=True)
    same_words(family, "file")


def test_loaded_prefix_ends_where_every_group_can_continue(family: Life) -> None:
    family.engine.forget()
    answer = family.engine.say(LONG)
    assert answer["hit"] == [family.family.ends]
    if family.family.exact:
        assert answer["tokens"] == family.long["tokens"]
        assert distance(answer, family.long) < 1e-4


@pytest.mark.long
def test_snapshot_completes_attention_blocks_still_in_the_engine(family: Life) -> None:
    """The tiers' prefix ends where these blocks end: the load brings the last of them, and the snapshot."""
    kinds = [name for name, _, _ in family.engine.about["groups"]]
    if "MambaSpec" not in kinds:
        pytest.skip("this family has no states")
    engine, block = family.engine.engine, family.engine.about["block_size"]
    family.engine.forget()
    same_words(family, "host")
    answers = []
    for spoiled in (False, True):
        assert engine.call("evict_states")
        if spoiled:
            assert engine.call("spoil_cached", kinds.index("FullAttentionSpec"))
        engine.call("new_loads")
        answers.append(family.engine.say(family.asked))
        assert engine.call("new_loads") == [("tiers", len(TEXT) - block, len(TEXT))]
    assert distance(answers[0], family.reference) == 0.0
    assert distance(answers[1], answers[0]) > 1e-4, "the engine's own blocks are not used"
    family.engine.forget()


def test_kv_events_tell_a_router_which_tier_has_which_blocks(family: Life) -> None:
    kinds = [name for name, _, _ in family.engine.about["groups"]]
    if not family.engine.about["prefix_caching"]:
        pytest.skip("an engine without prefix caching names no blocks")
    full, groups, text = kinds.index("FullAttentionSpec"), set(range(len(kinds))), prompt(513, 25)
    with Router(family.events) as router:
        family.engine.say(text)
        router.follow()
        # vLLM reports the blocks that a window or a state needs; kvferry stores those of other prefixes too.
        own = set[bytes]().union(*(router.blocks["GPU", None, group] for group in groups))
        for medium, tier in (("CPU", "host"), ("STORAGE", "file")):
            found = {group: router.blocks[medium, tier, group] for group in groups}
            assert found[full] == router.blocks["GPU", None, full]
            assert all(blocks and blocks <= own for blocks in found.values())
        stored = [event for event in router.events if event["type"] == "BlockStored"]
        by_hash = {
            event["block_hashes"][0]: event["token_ids"][: event["block_size"]]
            for event in stored
            if (event["medium"], event["group_idx"]) == ("GPU", full)
        }
        of_host = [event for event in stored if (event["medium"], event["group_idx"]) == ("CPU", full)]
        first = of_host[0]["block_hashes"][0]
        assert by_hash[first] == of_host[0]["token_ids"][: of_host[0]["block_size"]]
        cuts = {cut: text[:cut] + prompt(40, cut) for cut in (130, 300, 390)}
        announced = {cut: router.longest("CPU", "host", asked) for cut, asked in cuts.items()}
        for cut, asked in cuts.items():
            family.engine.forget()
            answer = family.engine.say(asked)
            assert answer["hit"] == [announced[cut]], cut
            if family.family.exact:
                assert distance(answer, family.engine.say(asked, salt="computed anew")) < 1e-4
        assert announced[300] > 0
        router.follow()
        router.events.clear()
        family.engine.engine.call("forget_host_memory")
        family.engine.say(prompt(40, 26))
        router.follow()
        removed = [event for event in router.events if event["type"] == "BlockRemoved"]
        assert {event["group_idx"] for event in removed if event["ownership"] == "host"} == groups
        assert not [event for event in removed if event["ownership"] == "file"]


def test_recording_holds_the_hits_of_the_engine_and_its_tiers(family: Life) -> None:
    engine, text = family.engine, prompt(512, 27)
    header, *before = recorded(family)
    answers, loaded = [], []
    for forget in ({}, None, {}, {"host": True}):
        if forget is not None:
            engine.forget(**forget)
        had = hit_tokens(family)
        answers.append(engine.say(text))
        loaded.append(dict(hit_tokens(family) - had))
    wait_for(lambda: len(recorded(family)) == 1 + len(before) + len(answers))
    lines, unit = recorded(family)[1 + len(before) :], header["unit_tokens"]
    assert [tokens for _, tokens, _ in engine.about["groups"]] == header["block_tokens"]
    for line, answer, had in zip(lines, answers, loaded, strict=True):
        assert (line["prompt_tokens"], line["output_tokens"]) == (len(text), len(answer["tokens"]))
        assert line["loaded"] == had
        assert line["local_tokens"] + sum(had.values()) == answer["cached"]
        assert line["end"] > line["arrival"]
        keys = ChunkKeys(unit, text + answer["tokens"], salt="kvferry-recording-1 ")
        assert b64decode(line["keys"]) == b"".join(key[:8] for key in keys.chunks())
        assert b64decode(line["prompt_key"]) == keys.at(len(text))[:8]
    cold, own, host, file = lines
    assert [line["local_tokens"] for line in (cold, host, file)] == [0, 0, 0]
    assert (own["local_tokens"] > 0) == engine.about["prefix_caching"]
    assert [set(line["loaded"]) for line in (cold, host, file)] == [set(), {"host"}, {"file"}]


@pytest.mark.long
def test_replay_of_a_recording_finds_the_hits_of_the_engine(family: Life) -> None:
    if len({tokens for _, tokens, _ in family.engine.about["groups"]}) > 1:
        pytest.skip("a replay serves engines whose groups have blocks of one size")
    before = len(recorded(family))
    # An engine that publishes events also loads the first blocks of a chunk, which a replay does not know. So
    # these prompts branch off in the first block of a chunk.
    first, other = prompt(522, 41), prompt(400, 42)
    turns = [first, other, other, first[:512] + prompt(150, 43), first, first + prompt(200, 44), other[:266]]
    forgotten = {3, 5}  # the engine forgets its own prefixes before these
    for number, text in enumerate(turns):
        if number in forgotten:
            family.engine.forget()
        family.engine.say(text)
    wait_for(lambda: len(recorded(family)) == before + len(turns))
    trace = open_trace(family.recording)
    model = model_of_engine(family.checkpoint, trace, family.family.options.get(EVERY, 0), "float32")
    caching = family.engine.about["prefix_caching"]
    replay = replay_of(model, trace, ("host=64MiB", "file=1GiB"), prefix_caching=caching)
    requests = list(trace)[before - 1 :]
    real = found_by_engine(requests)
    assert found_in_replay(replay, requests, forgotten) == real
    assert any(local for local, _ in real) == caching
    assert any(loaded for _, loaded in real)


def hit_tokens(life: Life) -> Counter[str]:
    """Tokens that the engine has loaded by now, by tier."""
    name, counted = "hit_tokens tiers ", life.engine.engine.call("counted")
    return Counter({key.removeprefix(name): n for key, n in counted.items() if key.startswith(name)})


def recorded(life: Life) -> list[dict[str, Any]]:
    """The header and the requests that an engine has recorded so far."""
    whole = life.recording.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def test_loaded_chunks_are_used_and_damaged_chunks_are_not(family: Life) -> None:
    for group, paths in chunk_files(family.directory).items():
        sound = {path: path.read_bytes() for path in paths}
        for path in paths:
            spoil(path, with_checksum=True)
        family.engine.forget(host=True)
        wrong = family.engine.say(family.asked)
        assert wrong["hit"] in AT_HAND, "nobody can tell that these chunks are spoiled"
        apart = distance(wrong, family.reference)
        assert apart > 1e-4, f"{group}: the answer does not depend on what was loaded"
        for path, image in sound.items():
            path.write_bytes(image)
            spoil(path, with_checksum=False)
        family.engine.forget(host=True)
        refused = family.engine.engine.call("tier_counts")["missed"].get("file corrupt", 0)
        answer = family.engine.say(family.asked)
        assert family.engine.engine.call("tier_counts")["missed"]["file corrupt"] > refused
        assert answer["hit"][:1] in AT_HAND, "that these chunks are damaged shows when they are read"
        assert distance(answer, family.reference) < (1e-4 if family.family.exact else apart / 4), group
        assert len(list((family.directory / "quarantine").iterdir())) >= refused + 1
        for path, image in sound.items():
            path.write_bytes(image)
        family.engine.forget(host=True)
        same_words(family, "file")


def test_prompt_is_loaded_after_a_restart_with_another_block_size_and_back(family: Life) -> None:
    block = family.engine.about["block_size"]
    for seed, options, ends in ((23, family.family.other, 512), (24, {}, family.family.other_ends)):
        asked, reference = family.engine.own_words(prompt(512, seed))
        # Of another interpreter the first time: nothing that it draws at its start may name a chunk.
        family.restart(fresh=seed == 23, **options)
        assert (family.engine.about["block_size"] != block) == ("block_size" in options)
        answer = family.engine.say(asked)
        assert answer["hit"] == [ends]
        if ends == 512:
            assert distance(answer, reference) == 0.0


@of_each_length
@pytest.mark.timeout(900)
def test_prompt_of_any_length_gets_the_same_answer_again(
    family: Life, texts_of: Callable[[int, int], list[list[int]]]
) -> None:
    engine = family.engine
    texts = texts_of(engine.about["block_size"], 30_000)
    limit_admissions(engine.engine)
    engine.engine.call("wait_for_tiers")
    first = said(engine, texts)
    engine.forget()
    engine.engine.call("new_loads")
    second = said(engine, texts)
    loads = engine.engine.call("new_loads")
    assert len(loads) >= len(texts) // 4, "the tiers were not asked"
    apart = [distance(one, other) for one, other in zip(first, second, strict=True)]
    assert {answer["finish"] for answer in (*first, *second)} == {"length"}
    # Of what was loaded only the last token is computed, which is another cut of the prompt.
    assert max(apart) < (1e-4 if family.family.exact else 0.2)


def said(engine: Tiered, texts: list[list[int]], at_once: int = 64) -> list[dict[str, Any]]:
    """Short answers to so many prompts at once: a tier that falls behind would lose what it is to keep."""
    answers = []
    for at in range(0, len(texts), at_once):
        answers += engine.engine.call("generate", texts[at : at + at_once], tokens=2)
        engine.settle()
    return answers
