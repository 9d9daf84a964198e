"""Chunks that two ranks stored, found by one rank with other blocks, and back; recurrent state as well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered, chunk_files, spoil


@dataclass(frozen=True)
class Case:
    """A model on two ranks and on one.

    Attributes:
        family: of `kvferry.tools.serving.tiny`; computes in float32, where ranks add up to nearly the same.
        two, one: options of each engine.
        chunk_tokens: of both.
    """

    family: str
    two: dict[str, Any]
    one: dict[str, Any]
    chunk_tokens: int

    def __str__(self) -> str:
        return self.family


EVERY = {"prefix_cache_retention_interval": 128}
STATE = {"enable_prefix_caching": True, "max_num_batched_tokens": 128, **EVERY}
CASES = (
    Case("qwen3", {"block_size": 128}, {"block_size": 64}, 256),
    Case("nemotronh", STATE, STATE, 64),
)
NEAR = 2e-3
"""How far answers of one rank and of two may be apart: they add up in another order."""

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_of_two_ranks_serve_one_and_back(case: Case, checkpoints: Path, tmp_path: Path) -> None:
    def start(name: str, **options: Any) -> Tiered:
        settings = {"chunk_tokens": case.chunk_tokens}
        log = tmp_path / f"{name}.log"
        return Tiered(case.family, checkpoints, tmp_path / "chunks", log, options, settings)

    there, back = prompt(512, 31), prompt(512, 32)
    two = start("two", tensor_parallel_size=2, **case.two)
    try:
        asked, said = two.own_words(there)
    finally:
        two.close()
    one = start("one", **case.one)
    try:
        answer = one.say(asked)
        assert answer["hit"] == [512]
        assert distance(answer, said) < NEAR
        for group, paths in chunk_files(tmp_path / "chunks").items():
            sound = {path: path.read_bytes() for path in paths}
            for path in paths:
                spoil(path, with_checksum=True)
            one.forget(host=True)
            assert distance(one.say(asked), said) > 10 * NEAR, group
            for path, image in sound.items():
                path.write_bytes(image)
        one.forget(host=True)
        asked, said = one.own_words(back)
    finally:
        one.close()
    two = start("again", tensor_parallel_size=2, **case.two)
    try:
        answer = two.say(asked)
        assert answer["hit"] == [512]
        assert distance(answer, said) < NEAR
    finally:
        two.close()
