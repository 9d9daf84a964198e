"""Engines that read each other's host memory: unlike blocks, spoiled chunks, holders that end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.marks import engines
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered


@dataclass(frozen=True)
class Family:
    """A family, and how the reader's engine differs from the holder's.

    Attributes:
        name: of `kvferry.tools.serving.tiny`.
        options: of both engines.
        other: of the reader.
        settings: of both connectors.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.label}"


STATES = {"enable_prefix_caching": True, "dtype": "bfloat16", "prefix_cache_retention_interval": 256}
REPRESENTATIVE = (Family("gemma3", other={"block_size": 64}),)
ALL = (
    Family("gemma3", other={"block_size": 64, "tensor_parallel_size": 2}, label="-tp-1-2"),
    Family("gemma3", {"tensor_parallel_size": 2}, other={"tensor_parallel_size": 1}, label="-tp-2-1"),
    Family("nemotronh", STATES),
    Family("dsv3"),
    Family("lfm2", {"prefix_cache_retention_interval": 128}, {"block_size": 64}, {"chunk_tokens": 64}),
)
TEXT, OTHER = prompt(512, 31), prompt(512, 32)

pytestmark = engines("fleet", REPRESENTATIVE, ALL)


class Fleet:
    """A holder and a reader, whose settings name the holder."""

    def __init__(self, family: Family, checkpoints: Path, folder: Path) -> None:
        self.family, self._checkpoints, self._folder = family, checkpoints, folder
        self.holder = self._start("holder", {"type": "fleet"}, family.options)
        self.port = self.holder.engine.call("fleet_server")["port"]
        named = {"type": "fleet", "engines": [f"127.0.0.1:{self.port}"], "find_seconds": 8}
        try:
            self.reader = self._start("reader", named, {**family.options, **family.other})
            self.reader.engine.call("fleet_server")
            self.reader.engine.call("wait_for_tiers")
        except BaseException:
            self.holder.close()
            raise

    def _start(self, name: str, fleet: dict[str, Any], options: dict[str, Any]) -> Tiered:
        tiers = [{"type": "host", "capacity": "64MiB"}, fleet]
        of = self.family
        told = (of.name, self._checkpoints, self._folder, self._folder / f"{name}.log", options, of.settings)
        return Tiered(*told, tiers=tiers)

    def read(self, text: list[int]) -> dict[str, Any]:
        """The reader's answer, which knows nothing of the text; with ``fetched``, chunks from the holder."""
        self.reader.forget(host=True)
        before = self.fetched
        answer = self.reader.say(text)
        return {**answer, "fetched": self.fetched - before}

    @property
    def fetched(self) -> int:
        return int(self.reader.engine.call("tier_counts")["fetched"].get("fleet", 0))

    def close(self) -> None:
        self.holder.close()
        self.reader.close()


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, running: Any, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    running.close()
    fleet = Fleet(request.param, checkpoints, tmp_path_factory.mktemp(str(request.param)))
    yield fleet
    fleet.close()


def test_prompt_that_another_engine_computed_is_read_from_its_host_memory(fleet: Fleet) -> None:
    asked, reference = fleet.holder.own_words(TEXT)
    answer = fleet.read(asked)
    assert answer["hit"] == [len(TEXT)]
    assert answer["fetched"] >= 2
    assert answer["tokens"] == reference["tokens"]
    assert distance(answer, reference) < 1e-4


def test_chunk_that_was_read_is_in_host_memory_of_its_own(fleet: Fleet) -> None:
    asked, _ = fleet.holder.own_words(TEXT)
    fleet.read(asked)
    fleet.reader.forget()
    before = fleet.fetched
    assert fleet.reader.say(asked)["hit"] in ([len(TEXT)], [len(asked)])
    assert fleet.fetched == before


def test_what_the_other_engine_has_is_what_is_read(fleet: Fleet) -> None:
    asked, reference = fleet.holder.own_words(TEXT)
    fleet.holder.engine.call("spoil_host_memory")
    try:
        spoiled = fleet.read(asked)
    finally:
        fleet.holder.forget(host=True)
    assert spoiled["fetched"] >= 2
    assert distance(spoiled, reference) > 1e-3


def test_answer_is_right_if_bytes_change_on_the_way_or_the_holder_ends(fleet: Fleet) -> None:
    """The last test of the pair: it ends the holder."""
    asked, _ = fleet.holder.own_words(OTHER)
    fleet.holder.forget(host=True)
    # Not the holder's answer: with other blocks, LFM2 on a CPU computes other values.
    alone = fleet.read(asked)
    assert alone["fetched"] == 0
    fleet.holder.own_words(OTHER)
    fleet.reader.engine.call("spoil_reads", spoiled=True)
    changed = fleet.read(asked)
    fleet.reader.engine.call("spoil_reads", spoiled=False)
    assert fleet.reader.engine.call("tier_counts")["missed"]["fleet corrupt"] >= 1
    fleet.holder.engine.kill()
    ended = fleet.read(asked)
    for answer in (changed, ended):
        assert answer["fetched"] == 0
        assert answer["tokens"] == alone["tokens"]
    assert fleet.reader.engine.call("held") == {}
