"""Tiers are measured with real chunks, in seconds where they are small."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.bench import fio, lookup, offload, offload_report
from kvferry.bench.chunks import CHUNK_TOKENS, Ranks, chunk_group
from kvferry.bench.engines import read_geometry
from kvferry.bench.host_tier import contests, prove
from kvferry.bench.slow_tier import Bodies, Loads, queue_over, store_all
from kvferry.errors import ConfigError, TransferError
from kvferry.plan.side import Side
from support.stores import open_store

TINY = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32})
CHUNK_BYTES = 2 * 2 * 2 * 32 * 2 * CHUNK_TOKENS


def quiet(_: str) -> None:
    """Progress is not looked at."""


@pytest.mark.parametrize("has_fio", [False, True])
def test_all_tiers_are_measured_once_through(tmp_path: Path, monkeypatch, has_fio: bool) -> None:
    if has_fio and not fio.has_fio():
        pytest.skip("there is no fio here")
    monkeypatch.setattr("kvferry.bench.file_tier.has_fio", lambda: has_fio)
    folders = [tmp_path / name for name in ("files", "objects")]
    for folder in folders:
        folder.mkdir()
    files, objects = folders
    job = offload.Job(
        TINY,
        offload.DEFAULT_PARTS,
        (Side(layout="LBNHC"), Side(layout="BHLNC", block_tokens=64)),
        (1, 3),
        2,
        files,
        objects.as_uri(),
        stored=20_000,
        looked_for=2048,
    )
    measured = offload.measure(job, quiet)
    assert [(s.tier, s.way, s.depth) for s in measured.speeds] == [
        (tier, way, depth)
        for tier in ("host, LBNHC", "host, BHLNC", "file", "object")
        for depth in (1, 3)
        for way in ("store", "load")
    ]
    bytes_of = {(s.tier.startswith("host"), s.ours.bytes) for s in measured.speeds}
    assert bytes_of == {(True, 3 * CHUNK_BYTES), (False, 8 * CHUNK_BYTES)}
    assert [len(s.limits) for s in measured.speeds if s.tier == "file"] == [1 + has_fio] * 4
    assert [path for folder in folders for path in folder.rglob("*") if path.is_file()] == []
    json.dumps(offload_report.as_json(measured))


def test_a_prompt_is_found_where_it_is_and_nowhere_else() -> None:
    found = lookup.measure(chunk_group(TINY), 2048, 20_000, 2, quiet)
    assert {one.place: one.tokens for one in found.looks} == {"host": 2048, "file": 2048, "nowhere": 0}
    assert found.chunks == 8
    assert 3 * 8 < found.in_host < 20_000 // 8


def test_five_sources_are_asked_whoever_has_how_much_of_a_prompt(tmp_path: Path) -> None:
    from kvferry.bench import ask_rounds

    found = ask_rounds.measure(tmp_path, 16 * CHUNK_TOKENS, 2, quiet)
    kinds = {(one.layers, one.policy, one.place) for one in found.asks}
    assert kinds == {
        (layers, policy, place)
        for layers in ask_rounds.LAYERS
        for policy in ask_rounds.POLICIES
        for place in ask_rounds.PLACES
    }
    assert len(found.asks) == len(kinds)
    assert all(0 < one.first.median <= one.first.p99 for one in found.asks)
    assert all(min(one.shares) > 0 for one in found.asks)
    assert len(set(found.known)) > 1, "parts are of different length"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_got_other_bytes_is_noticed() -> None:
    with Ranks(TINY, Side(layout="LBNHC"), 2) as ranks, ExitStack() as stack:
        made = contests(stack, ranks, (2,))
        prove(made, ranks)
        store, load = made
        load.ours.move = store.ours.move
        with pytest.raises(TransferError, match="are not what they must be"):
            prove(made, ranks)


def test_a_chunk_that_is_not_in_a_tier_ends_the_benchmark(tmp_path: Path) -> None:
    group = chunk_group(TINY)
    with Bodies(group, CHUNK_TOKENS, 8) as bodies, queue_over(open_store(tmp_path)) as queue:
        store_all(queue, bodies, 7, 2)
        with pytest.raises(TransferError, match="file tier: a chunk is absent, expected hit"):
            Loads(queue, bodies, bodies, 8).move()


def test_a_model_with_chunks_of_several_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers of several kinds"):
        chunk_group(read_geometry("gpt-oss-20b"))
