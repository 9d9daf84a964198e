"""Tiers are measured with real chunks, in seconds where they are small."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError, TransferError
from kvferry.tools.bench import file_tier, tiers, tiers as tiers_report
from kvferry.tools.bench.host_tier import tier_cases, verify_copies
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, RankPair, chunk_group
from kvferry.tools.bench.storage_chunks import RandomChunks, load_mover, open_queue, store_all
from kvferry.tools.measuring.simulated import read_geometry
from kvferry.tools.plan.side import EngineSide
from support.stores import open_store

TINY = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32})
CHUNK_BYTES = 2 * 2 * 2 * 32 * 2 * CHUNK_TOKENS


def quiet(_: str) -> None:
    """Progress is not looked at."""


@pytest.mark.parametrize("has_fio", [False, True])
def test_all_tiers_are_measured_once_through(tmp_path: Path, monkeypatch, has_fio: bool) -> None:
    if has_fio and not file_tier.has_fio():
        pytest.skip("there is no fio here")
    monkeypatch.setattr("kvferry.tools.bench.file_tier.has_fio", lambda: has_fio)
    folders = [tmp_path / name for name in ("files", "objects")]
    for folder in folders:
        folder.mkdir()
    files, objects = folders
    job = tiers.TiersJob(
        reading=TINY,
        sides=(EngineSide(layout="LBNHC"), EngineSide(layout="BHLNC", block_tokens=64)),
        depths=(1, 3),
        repeats=2,
        path=files,
        url=objects.as_uri(),
    )
    measured = tiers.measure(job, quiet)
    assert [(s.tier, s.direction, s.depth) for s in measured.speeds] == [
        (tier, direction, depth)
        for tier in ("host, LBNHC", "host, BHLNC", "file", "object")
        for depth in (1, 3)
        for direction in ("store", "load", *(["load, cached"] if tier == "file" else []))
    ]
    bytes_of = {(s.tier.startswith("host"), s.ours.bytes) for s in measured.speeds}
    assert bytes_of == {(True, 3 * CHUNK_BYTES), (False, 8 * CHUNK_BYTES)}
    assert [len(s.limits) for s in measured.speeds if s.tier == "file"] == [1 + has_fio, 1 + has_fio, 1] * 2
    assert [path for folder in folders for path in folder.rglob("*") if path.is_file()] == []
    json.dumps(tiers_report.as_json(measured))


def test_a_rank_that_got_other_bytes_is_noticed() -> None:
    with RankPair(TINY, EngineSide(layout="LBNHC"), 2) as ranks, ExitStack() as stack:
        made = tier_cases(stack, ranks, (2,))
        verify_copies(made, ranks)
        store, load = made
        load.ours.move = store.ours.move
        with pytest.raises(TransferError, match="are not what they must be"):
            verify_copies(made, ranks)


def test_a_chunk_that_is_not_in_a_tier_ends_the_benchmark(tmp_path: Path) -> None:
    group = chunk_group(TINY)
    with RandomChunks(group, CHUNK_TOKENS, 8) as chunks, open_queue(open_store(tmp_path), "file") as queue:
        store_all(queue, chunks, 7, 2)
        with pytest.raises(TransferError, match="file tier: a chunk is absent, expected hit"):
            load_mover(queue, chunks, chunks, 8).move()


def test_a_model_with_chunks_of_several_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers of several kinds"):
        chunk_group(read_geometry("gpt-oss-20b"))
