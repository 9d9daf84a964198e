"""vLLM's scheduler records its requests: with tiers and without, in a file for each engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import WorkerInfo
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.messages import WorkerCard
from kvferry.observe.recorder import RequestRecorder
from support.block_pool import BlockPool, request
from support.pages import kv_page, rank_of
from support.vllm_config import configured, scheduler_connector

BLOCK, PROMPT, OWN, ANSWER = 16, 40, 16, 3
TIERS = {"tiers": [{"type": "host", "capacity": "1MiB"}], "chunk_tokens": 32, "snapshot_tokens": 64}


@pytest.fixture
def start() -> Iterator[Callable[..., KVFerryConnector]]:
    """Start the scheduler's half of an engine without peers, whose workers only a test plays."""
    started = []

    def one(index: int = 0, **settings: Any) -> KVFerryConnector:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float16)
        group = KVCacheGroupSpec(["layers.0"], spec)
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=8, hash_block_size=BLOCK)
        config = ConnectorConfig(explain_requests=0, **settings)
        half = scheduler_connector(configured(index=index), cache, config)
        started.append(half)
        half._pool = BlockPool(8)
        half._start((WorkerCard(WorkerInfo(geometry=rank_of(kv_page()), card=None), config.without_host),))
        return half

    yield one
    for half in started:
        half.shutdown()


def serve(half: KVFerryConnector, name: str = "a") -> None:
    """Admit a request after tokens of the engine's own prefix cache, compute the rest, and end it."""
    one = request(name, range(PROMPT + ANSWER), PROMPT).raw
    one.prefill_stats = SimpleNamespace(num_local_cached_tokens=OWN)
    one.client_index, one.status = 0, None
    half.on_new_request(one)
    assert half.get_num_new_matched_tokens(one, OWN) == (0, False)
    held = half._pool.allocate(3)
    table = [block.block_id for block in held]
    half.update_state_after_alloc(one, SimpleNamespace(blocks=(held,)), 0)
    one.num_computed_tokens = OWN
    state = SimpleNamespace(boundary_state_offloads={}, resolve_block_ids=lambda _: (table,))
    half.build_connector_meta(
        SimpleNamespace(
            num_scheduled_tokens={name: PROMPT - OWN},
            total_num_scheduled_tokens=PROMPT - OWN,
            kv_connector_block_state=state,
        )
    )
    one.num_computed_tokens, one.prefill_stats = PROMPT + ANSWER - 1, None
    half.request_finished_all_groups(one, (table,))


@pytest.mark.parametrize(
    ("settings", "chunks"), [({}, (None, None)), (TIERS, (32, 64))], ids=["no tiers", "tiers"]
)
def test_a_request_that_has_ended_is_a_line(
    start: Callable[..., KVFerryConnector], tmp_path: Path, settings: dict[str, Any], chunks: tuple[Any, Any]
) -> None:
    path = tmp_path / "trace.jsonl"
    half = start(record=str(path), **settings)
    for name in "ab":
        serve(half, name)
    half.shutdown()
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header == {
        "kvferry_trace": 1,
        "unit_tokens": BLOCK,
        "chunk_tokens": chunks[0],
        "block_tokens": [BLOCK],
        "step_tokens": 256,
        "num_blocks": 8,
        "groups": ["0 full_attention"],
        "snapshot_tokens": chunks[1],
        "first_snapshot_tokens": None,
        "model": "tiny",
    }
    assert [(line["prompt_tokens"], line["output_tokens"]) for line in lines] == [(PROMPT, ANSWER)] * 2
    assert [(line["local_tokens"], line["loaded"]) for line in lines] == [(OWN, {})] * 2
    assert lines[0]["keys"] == lines[1]["keys"]


def test_each_data_parallel_engine_has_its_own_file(
    start: Callable[..., KVFerryConnector], tmp_path: Path
) -> None:
    for index in (0, 1, 1):
        start(index, record=str(tmp_path / "trace.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "trace.jsonl", "trace-dp1.jsonl", "trace-dp1-2.jsonl",
    }  # fmt: skip


def test_only_an_engine_with_a_file_records(start: Callable[..., KVFerryConnector], tmp_path: Path) -> None:
    for half in (start(), start(record=str(tmp_path / "no" / "folder"))):
        assert not any(isinstance(one, RequestRecorder) for one in half.half.events._listeners)
        serve(half)
