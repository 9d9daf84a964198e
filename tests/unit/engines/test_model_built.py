"""The cache that is read from a config.json is the one that vLLM's model classes keep, layer by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.tools.models import per_layer, read_model
from kvferry.tools.models.interior import page_interior
from kvferry.tools.models.layout import lay_out
from kvferry.tools.plan.side import EngineSide, shape
from support.built_models import (
    BUILT,
    FAMILIES,
    MIXED,
    NOT_BUILT,
    QUESTIONS,
    RENEW,
    TABLE,
    build,
    config_of,
    layers_of,
    recorded,
)

pytest.importorskip("vllm")

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MLAAttentionSpec": GroupKind.MLA,
    "MambaSpec": GroupKind.STATE,
}
ALWAYS_BUILT = {("gpt-oss-20b", 2), ("Qwen3.5-27B", 2), ("DeepSeek-V4-Flash", 1), ("gemma2", 1)}
"""Models with every kind of spec, whose record each run compares with vLLM."""


def theirs(answer: dict[str, Any], count: int) -> Counter[Any]:
    """(layer, kind, attention span, heads, bytes of an entry or snapshot on rank 0, tokens of an entry)."""
    # vLLM numbers the states that Falcon-H1 has beside attention from the last layer on.
    return Counter((layer % count, KINDS[spec], *kept) for layer, (spec, *kept) in layers_of(answer))


def ours(config: dict[str, Any], tp: int) -> tuple[Counter[Any], int]:
    """The same, read from the configuration, and how many layers the model has."""
    reading = read_model(config)
    found: Counter[Any] = Counter()
    for number, stores in enumerate(per_layer(reading)):
        for store in stores:
            inside = page_interior(store, 1, 1, 0, tp)
            heads = 0 if inside.snapshot else inside.heads
            found[number, store.kind, store.attention_span, heads, inside.page_bytes, store.state_tokens] += 1
    return found, len(reading.kept)


@pytest.mark.parametrize(("name", "tp"), BUILT)
def test_a_model_of_the_table_keeps_what_vllm_builds(name, tp):
    answer = recorded(name, tp)
    if "must be divisible by tensor parallel size" in answer.get("error", ""):
        with pytest.raises(GeometryError, match=f"attention heads on {tp} tensor-parallel ranks"):
            lay_out(read_model(TABLE[name]).cache, shape(read_model(TABLE[name]), EngineSide(tp), 1))
        return
    assert "error" not in answer
    found, layers = ours(TABLE[name], tp)
    assert found == theirs(answer, layers)


SIDES = {
    "cuda L": EngineSide(layout="LBNHC"),
    "cuda B": EngineSide(layout="BLHNC"),
    # Blocks on CPUs have 128 tokens, unless state makes them larger.
    "cpu": EngineSide(block_tokens=128),
}
"""Engines that are planned, by vLLM's set-up."""
ON_CPU = [name for name in MIXED if GroupKind.STATE in MIXED[name] and GroupKind.MLA not in MIXED[name]]
"""Hybrids whose blocks vLLM's kernels for CPUs take: those for latents take 16 tokens only."""


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        (name, setup)
        for name in MIXED
        if name not in NOT_BUILT
        for setup in SIDES
        if setup != "cpu" or name in ON_CPU
    ],
)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_blocks_and_groups_are_those_that_vllm_derives(name, tp, setup):
    reading, side = read_model(TABLE[name]), replace(SIDES[setup], tp=tp)
    answer = recorded(name, tp)
    if "error" in answer:
        assert "must be divisible by tensor parallel size" in answer["error"]
        return
    groups = answer["groups"][setup]
    if isinstance(groups, str):
        assert "page size is not divisible by the maximum page size" in groups
        with pytest.raises(GeometryError, match="use BLHNC"):
            shape(reading, side, 1)
        return
    stores = reading.cache.layers
    found = Counter(
        (stores[group.layers[0]].kind, group.block_tokens, len(group.layers))
        for group in shape(reading, side, 1).groups
    )
    assert found == Counter((KINDS[spec], *rest) for group in groups for spec, *rest in group)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_what_vllm_builds(name):
    answer = recorded(name, 1)
    assert "error" not in answer
    found, layers = ours(config_of(name), 1)
    assert found == theirs(answer, layers)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """vLLM's answers for the models of all tests that are selected: one process builds them."""
    name = test_vllm_builds_what_is_recorded.__name__
    selected = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == name
    ]
    return build((one["name"], one["tp"]) for one in selected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("built models")
@pytest.mark.parametrize(
    ("name", "tp"),
    [pytest.param(*one, marks=() if one in ALWAYS_BUILT else pytest.mark.long) for one in QUESTIONS],
)
def test_vllm_builds_what_is_recorded(name, tp, built):
    assert built[name, tp] == recorded(name, tp), RENEW
