"""An engine of `benchmarks choice` says which source brought what it was asked for again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint import token_bytes, write_checkpoint
from benchmarks.choice.policy_engine import PolicyEngine, Setup
from benchmarks.choice.workload import Prompt, Workload
from benchmarks.served import side_by_side, tiered

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_policy_first_loads_a_repeated_prompt_from_the_first_connector(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("near", "far")]
    for folder in folders:
        folder.mkdir()
    tiers = [
        [{"type": "host", "capacity": "16MiB"}, {"type": "file", "path": str(folder), "capacity": "64MiB"}]
        for folder in folders
    ]
    named = [
        {**tiered(of, chunk_tokens=64), "name": folder.name}
        for of, folder in zip(tiers, folders, strict=True)
    ]
    model = write_checkpoint(tmp_path / "model", 1024)
    cache_bytes = 4096 * token_bytes()
    twice = Workload("twice", 64, (Prompt((1, 2, 3), 180), Prompt((1, 2, 3, 4), 256)))
    with PolicyEngine(
        "first", Setup(model, 1024, cache_bytes, side_by_side(named, source_policy="first"), 1)
    ) as one:
        one.wait()
        new, again = one.replay(twice, 0)
        assert (new.served, again.served) == ({}, {"file": 128})
        assert new.failed == again.failed == 0
        assert one.replay(twice, 1)[0].served == {}, "another salt is another prompt"
