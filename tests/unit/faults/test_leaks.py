"""What a campaign leaves behind is seen: blocks, shared memory, files, dead engines."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import stage as module
from faults.stage import Stage, left_sockets, shared_memory_of
from faults.tier_hooks import unsound_files
from faults.values import Leaks
from kvferry.observe import socket_directory
from support.stores import file_of, keep, open_store

pytestmark = pytest.mark.slow


def test_shared_memory_of_a_process_is_found_mapped_or_open():
    opened, mapped = (Path(f"/dev/shm/kvferry-test-{uuid.uuid4().hex}") for _ in range(2))
    names = {opened.name, mapped.name}
    mapped.write_bytes(bytes(4096))
    try:
        memory = torch.from_file(str(mapped), shared=True, size=4096, dtype=torch.uint8)
        with opened.open("wb"):
            assert names <= shared_memory_of(os.getpid())
        del memory
        assert not names & shared_memory_of(os.getpid())
    finally:
        opened.unlink()
        mapped.unlink()


def test_chunks_that_are_damaged_misnamed_or_half_written_are_unsound(tmp_path: Path):
    store = open_store(tmp_path, capacity=1 << 24)
    for number in range(3):
        keep(store, number)
    assert unsound_files(str(tmp_path)) == []
    half = file_of(tmp_path, 0).with_suffix(".tmp")
    half.write_bytes(b"half")
    assert unsound_files(str(tmp_path)) == [f"half written: {half}"]
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 0).read_bytes())
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 2).read_bytes()[:-1])
    assert len(unsound_files(str(tmp_path))) == 3


def test_sockets_that_engines_have_left_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert left_sockets() == []
    folder = socket_directory.socket_directories()[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.sock").touch()
    assert left_sockets() == [str(folder / "engine.sock")]


class Ended:
    """An engine at the end of a campaign."""

    def __init__(self, free: int, held: dict[str, int], died: str) -> None:
        self.pid, self.died, self._free, self._held = os.getpid(), died, free, held

    async def do(self, name: str) -> Any:
        return {"free_blocks": self._free, "at_rest": self._held}.get(name, 0)

    def close(self) -> None:
        pass

    deafen = part = close


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        (Ended(50, {}, ""), Leaks()),
        (Ended(47, {}, ""), Leaks(blocks=3)),
        (Ended(50, {"pins": 2}, ""), Leaks(blocks=1)),
        (Ended(50, {}, "its process ended"), Leaks(engine_deaths=1)),
    ],
    ids=["nothing", "blocks", "pins", "death"],
)
def test_blocks_pins_and_deaths_at_the_end_count_as_leaks(
    engine: Ended, left: Leaks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(module, "shared_memory_of", lambda _: set())
    monkeypatch.setattr(Stage.rest, "__defaults__", (0.2,))
    assert counts(stopped(engine, tmp_path)) == counts(left)


def test_shared_memory_and_files_that_are_there_at_the_end_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runtime = tmp_path / "run"  # an absent one would count sockets of others, in the directory in /tmp
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "shared_memory_of", lambda _: {"stays", "gone"})
    (tmp_path / "stays").touch()
    (tmp_path / "half.tmp").touch()
    assert counts(stopped(Ended(50, {}, ""), tmp_path)) == counts(Leaks(shared_memory=1, files=1))


def stopped(engine: Ended, folder: Path) -> Leaks:
    """What is left by a pair of this engine and one without a fault."""
    stage = object.__new__(Stage)
    stage.prefill, stage.decode = Ended(50, {}, ""), engine  # type: ignore[assignment]
    stage.directory, stage._free, stage._deaths, stage._shared = folder, [50, 50], [], set()
    stage._ports = ExitStack()
    return asyncio.run(stage.stop())


def counts(of: Leaks) -> tuple[int, ...]:
    return of.engine_deaths, of.blocks, of.shared_memory, of.files
