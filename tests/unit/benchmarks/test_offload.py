"""Prompts are looked up and asked for, in seconds where indexes are small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.offload import ask_rounds, lookup, report
from benchmarks.offload.measure import OffloadJob, measure
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS, chunk_group
from kvferry.tools.measuring.simulated import read_geometry

pytestmark = pytest.mark.slow

TINY = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32})


def quiet(_: str) -> None:
    """Progress is not looked at."""


def test_the_parts_that_need_no_engine_are_measured_once_through(tmp_path: Path) -> None:
    job = OffloadJob(
        reading=TINY,
        parts=("lookup", "asking"),
        repeats=1,
        path=tmp_path,
        stored=20_000,
        prompt_tokens=16 * CHUNK_TOKENS,
    )
    measured = measure(job, quiet)
    assert measured.lookup.chunks == measured.asking.chunks == 16
    assert (measured.hooks, measured.first_token) == (None, None)
    json.dumps(report.as_json(measured))


def test_lookup_finds_a_prompt_only_in_the_tier_that_has_it() -> None:
    found = lookup.measure(chunk_group(TINY), 2048, 20_000, 2, quiet)
    assert {one.place: one.tokens for one in found.looks} == {"host": 2048, "file": 2048, "nowhere": 0}
    assert found.chunks == 8
    assert 3 * 8 < found.in_host < 20_000 // 8


def test_five_sources_are_asked_in_every_layout_policy_and_place(tmp_path: Path) -> None:
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
