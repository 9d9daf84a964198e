"""Chunks in a real S3 server: stored by one engine, found by the next; and what an engine does without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.object_server import BUCKET
from support.object_server import s3
from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.tiered import Tiered

pytestmark = pytest.mark.engine


def test_object_store_serves_a_second_engine_that_goes_on_without_it(
    checkpoints: Path, tmp_path: Path
) -> None:
    def start(name: str, options: dict[str, str]) -> Tiered:
        tiers = [
            {"type": "host", "capacity": "64MiB"},
            {"type": "object", "url": f"s3://{BUCKET}/kv", "options": options, "timeout_seconds": 20},
        ]
        log = tmp_path / f"{name}.log"
        return Tiered("gemma3", checkpoints, tmp_path / "unused", log, tiers=tiers)

    (tmp_path / "s3").mkdir()
    with s3(tmp_path / "s3") as server:
        one = start("one", server.options)
        try:
            asked, said = one.own_words(prompt(512, 41))
        finally:
            one.close()
        assert len(list((tmp_path / "s3").rglob("*.kv"))) == 4, "two chunks of two groups"
        two = start("two", server.options)
        try:
            answer = two.say(asked)
            assert answer["hit"] == [512]
            assert distance(answer, said) == 0.0
            assert two.engine.call("tier_counts")["fetched"] == {"object": 3}, "of the window, one"
        except BaseException:
            two.close()
            raise
    try:  # the server has gone
        two.forget(host=True)
        answer = two.say(asked)
        assert answer["tokens"] == said["tokens"]
        log = two.log.read_text()
        assert log.count("object tier") == len({line for line in log.splitlines() if "object tier" in line})
    finally:
        two.close()
