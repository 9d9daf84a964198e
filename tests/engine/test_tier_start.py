"""Tiers that cannot be used, and settings under which none could be: said once, in words."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.vllm_engine.inside import distance
from support.vllm_engine.pair import prompt
from support.vllm_engine.process import EngineError
from support.vllm_engine.tiered import Tiered

pytestmark = pytest.mark.engine

TEXT = prompt(512, 40)
"""Ends where chunks do."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, the user's alone."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", str(path)], check=False
    ).returncode:
        pytest.skip("this user may not mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def file_tier(path: Path, capacity: str = "256MiB") -> dict[str, Any]:
    return {"type": "file", "path": str(path), "capacity": capacity}


def lines_about(log: str, path: Path) -> list[str]:
    """Warnings and errors that name a path, none below it."""
    named = re.compile(rf"(WARNING|ERROR) .*{re.escape(str(path))}[^/\w]")
    return [line for line in log.splitlines() if named.search(line)]


def test_unusable_tiers_are_logged_once_and_the_others_serve(
    running: object, checkpoints: Path, tmp_path: Path, disk: Path
) -> None:
    running.close()
    missing, other, small, good = (tmp_path / name for name in ("missing", "old", "s", "good"))
    for path in (other, small, good):
        path.mkdir()
    (again := tmp_path / "again").symlink_to(good)
    (other / "kvferry.json").write_text(json.dumps({"kvferry": "file tier", "directory": 99}))
    said = {
        missing: "does not exist",
        other: "directory version 99",
        tmp_path: "lower the capacity or free space",
    }
    unusable = [file_tier(path) for path in [*said][:-1]] + [file_tier(tmp_path, "999999TiB")]
    said[again] = "which is a tier already, are one directory"
    tiers = [
        {"type": "host", "capacity": "64MiB"}, *unusable, file_tier(small, "32KiB"), file_tier(disk, "3MiB"),
        file_tier(good), file_tier(again),
    ]  # fmt: skip
    settings = {"chunk_tokens": 64}
    tiered = Tiered("gemma3", checkpoints, good, tmp_path / "log", {"block_size": 64}, settings, tiers)
    try:
        (disk / "ballast").write_bytes(bytes(3_900_000))
        asked, reference = tiered.own_words(TEXT)
        for host in (False, True):
            tiered.forget(host=host)
            answer = tiered.say(asked)
            assert answer["hit"][0] >= len(TEXT)
            assert distance(answer, reference) == 0.0
        stats_small, stats_full, stats_good = tiered.engine.call("tier_stats")
        assert stats_small["puts"].keys() == {"larger than the capacity"}
        # Several threads store at once, so a store may find nothing to evict.
        assert stats_full["puts"].keys() <= {"stored", "present", "no space on the device"}
        assert stats_full["puts"]["stored"] > 0
        assert stats_full["evicted"] > 0
        assert stats_good["puts"].keys() <= {"stored", "present"}
        assert not list(small.rglob("*.kv"))
        assert tiered.engine.call("held") == {}
    finally:
        tiered.close()
    log = tiered.log.read_text()
    assert "Traceback" not in log
    for path, why in said.items():
        (line,) = lines_about(log, path)
        assert why in line
        assert "serves on without that tier" in line
    (line,) = lines_about(log, small)
    assert "larger than the capacity" in line
    about_disk = lines_about(log, disk)
    assert sum("is full before the capacity is used up" in line for line in about_disk) == 1
    assert sum("no space on the device" in line for line in about_disk) == len(about_disk) - 1 <= 1


UNCACHED = {"enable_prefix_caching": False}
NEVER = [
    ("lfm2", UNCACHED, {}, "enable prefix caching"),
    ("gemma3", {}, {"chunk_tokens": 2048}, "set chunk_tokens to 1024 or less"),
    ("gemma3", {}, {"chunk_tokens": 64}, "blocks of 128 tokens, .* set chunk_tokens to 128"),
    ("nemotronh", UNCACHED, {}, "enable prefix caching"),
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "options", "settings", "sentence"), NEVER)
def test_settings_under_which_tiers_cannot_serve_fail_at_start(
    running: object,
    checkpoints: Path,
    tmp_path: Path,
    family: str,
    options: dict,
    settings: dict,
    sentence: str,
) -> None:
    running.close()
    with pytest.raises(EngineError, match=sentence):
        Tiered(family, checkpoints, tmp_path / "chunks", tmp_path / "log", options, settings)
