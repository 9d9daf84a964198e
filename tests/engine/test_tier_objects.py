"""Chunks in a real S3 server: stored by one engine, found by the next; and what an engine does without it.

The model has learned to answer, so wrong bytes give wrong answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.accuracy.recall.models import MODELS
from benchmarks.accuracy.recall.task import WORDS
from benchmarks.object_server import BUCKET
from support.object_server import s3
from support.vllm_engine.inside import distance
from support.vllm_engine.tiered import Tiered, chunk_files, spoil

pytestmark = pytest.mark.engine

TRAINED = MODELS["gemma3"].folder


def question() -> tuple[list[int], int]:
    """A question without the mark before its answer, and the number that is the answer, as token ids.

    The chunks of its first 192 tokens hold both the pair and, within the window, the key that is asked for.
    """
    line = json.loads((TRAINED / "questions.jsonl").read_text().splitlines()[25])
    words = f"Question: {line['question']} Answer: {line['answer']}".split()
    *text, _, number = map(WORDS.index, words)
    return text, number


def test_object_store_serves_a_second_engine_that_goes_on_without_it(
    checkpoints: Path, tmp_path: Path
) -> None:
    def start(name: str, access: dict[str, str]) -> Tiered:
        tiers = [
            {"type": "host", "capacity": "64MiB"},
            {"type": "object", "url": f"s3://{BUCKET}/kv", "options": access, "timeout_seconds": 20},
        ]
        log, options, settings = tmp_path / f"{name}.log", {"block_size": 64}, {"chunk_tokens": 64}
        unused = tmp_path / "unused"
        return Tiered("gemma3", checkpoints, unused, log, options, settings, tiers, model=TRAINED)

    text, number = question()
    (tmp_path / "s3").mkdir()
    with s3(tmp_path / "s3") as server:
        one = start("one", server.options)
        try:
            asked, said = one.own_words(text)
        finally:
            one.close()
        assert said["tokens"][0] == number
        groups = chunk_files(tmp_path / "s3")
        assert [len(chunks) for chunks in groups.values()] == [4, 4]
        two = start("two", server.options)
        try:
            answer = two.say(asked)
            assert answer["hit"] == [192]
            assert distance(answer, said) == 0.0
            assert two.engine.call("tier_counts")["fetched"] == {"object": 4}, "of the window, one"
            for group, chunks in groups.items():
                sound = {path: path.read_bytes() for path in chunks}
                for path in chunks:
                    spoil(path, with_checksum=True)
                two.forget(host=True)
                assert two.say(asked)["tokens"][0] != number, f"{group} does not decide the answer"
                for path, image in sound.items():
                    path.write_bytes(image)
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
