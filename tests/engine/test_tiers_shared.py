"""Two engines that store and find, evict and load, in one directory that is too small for them."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Self

import pytest

from kvferry.tiers.admin import verify_all
from kvferry.tiers.files.admin import DirectoryAdmin
from kvferry.tiers.files.ledger import Ledger, LockTimeout
from kvferry.tools.serving.tiny import FAMILIES, tiny_checkpoint
from support.vllm_engine.faulty import Case, Plain
from support.vllm_engine.pair import connector, prompt
from support.vllm_engine.process import Engine
from support.vllm_engine.tiered import STEP

SECONDS = float(os.environ.get("KVFERRY_TEST_SHARING_SECONDS", "30"))
CAPACITY = 8 << 20
CASE = Case("gemma3", {"num_gpu_blocks_override": 120, "block_size": 64})

pytestmark = [pytest.mark.engine, pytest.mark.long]


def conversations(seed: int) -> list[list[int]]:
    """Prompts that share beginnings: 6 of 256 to 512 tokens, each gone on with in 8 ways, or in two turns."""
    rng = random.Random(seed)
    found = []
    for _ in range(6):
        start = prompt(rng.randrange(256, 512), rng.randrange(10**6))
        for _ in range(4):
            turn = start + prompt(rng.randrange(1, 200), rng.randrange(10**6))
            found += [turn, turn + prompt(rng.randrange(1, 200), rng.randrange(10**6))]
    return found


class Watch:
    """A thread that adds up the files of a directory, while nobody makes, names or removes one."""

    def __init__(self, root: Path) -> None:
        self.most, self.looks, self.over = 0, 0, []
        self._root, self._ended = root, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        ledger = Ledger(str(self._root))
        while not self._ended.wait(0.05):
            try:
                with ledger.held() as account:
                    size = sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())
                    if not size <= account.used <= account.capacity:
                        self.over.append((size, account.used, account.capacity))
            except LockTimeout:
                continue
            self.most, self.looks = max(self.most, size), self.looks + 1


@pytest.mark.timeout(300 + 2 * SECONDS)
def test_two_engines_share_a_directory_that_is_too_small(
    running: object, checkpoints: Path, tmp_path: Path
) -> None:
    running.close()
    seconds = SECONDS
    texts = conversations(int(seconds))
    plain = Plain(CASE, checkpoints, tmp_path / "plain.log", texts, 8)
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    tiers = [
        {"type": "host", "capacity": 2 << 20},
        {"type": "file", "path": str(chunks), "capacity": CAPACITY},
    ]
    options = {
        "model": str(tiny_checkpoint(CASE.family, checkpoints)),
        "kv_transfer_config": connector(tiers=tiers, chunk_tokens=64),
        **FAMILIES[CASE.family].engine_options(), **STEP, **CASE.options,
    }  # fmt: skip
    engines = [Engine(tmp_path / f"{name}.log", **options) for name in "ab"]
    try:
        for engine in engines:
            engine.ready()
            engine.call("wait_for_ledgers", seconds + 60)
        free = [engine.call("free_blocks") for engine in engines]
        with Watch(chunks) as watch:
            for number, engine in enumerate(engines):
                engine.begin("ask_for", texts, number, seconds)
            said = [engine.end(seconds + 120) for engine in engines]
            for engine in engines:
                engine.call("settle_tiers")
        for engine, had in zip(engines, free, strict=True):
            counts, (stats,) = engine.call("tier_counts"), engine.call("tier_stats")
            assert counts["fetched"]["file"] > 0
            assert stats["evicted"] > 0, "the directory was large enough: nothing was shown"
            assert not counts["missed"].keys() - {"file absent"}
            assert stats["puts"].keys() <= {"stored", "present"}
            assert engine.call("held") == {}
            assert engine.call("reset_prefix_cache")
            assert engine.call("free_blocks") == had
    finally:
        for engine in engines:
            engine.close()
    assert not watch.over
    assert watch.looks > seconds
    assert CAPACITY / 2 < watch.most <= CAPACITY
    verdict = verify_all(DirectoryAdmin(str(chunks)))
    assert verdict.chunks > 0
    assert not verdict.bad
    assert not list((chunks / "quarantine").iterdir())
    for answers in said:
        assert len({number for number, _ in answers}) > len(texts) / 2
        for number, answer in answers:
            plain.agree(texts[number], answer)
