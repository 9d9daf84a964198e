"""What is read from a config.json is what vLLM's own model classes keep, layer by layer.

vLLM builds every model in a process of its own (`support.vllm_engine.built`), in full size and without memory
for weights, and each of its layers is asked for its cache spec.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import GeometryError
from kvferry.geometry import GroupKind
from kvferry.geometry.interior import page_interior
from kvferry.geometry.layout import lay_out
from kvferry.geometry.models import per_layer, read_model
from kvferry.plan.find import entries
from kvferry.plan.side import EngineSide, shape
from support.families import ARCHITECTURES, default_config
from support.vllm_engine.built import ask

pytest.importorskip("vllm")
# One process builds them all, for the first test that asks.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING,
    "SlidingWindowMLASpec": GroupKind.SLIDING,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED,
    "MLAAttentionSpec": GroupKind.MLA,
    "MambaSpec": GroupKind.STATE,
}
TABLE = {
    entry.name: {key: value for key, value in entry.config.items() if key != "quantization_config"}
    for entry in entries()
}
MIXED = {
    name: kinds
    for name, config in TABLE.items()
    if len(stores := set(read_model(config).cache.layers)) > 1 and (kinds := {store.kind for store in stores})
}
"""Kinds of layers of those models whose layers differ, so that vLLM derives blocks and groups."""
NOT_BUILT = {
    "Llama-4-Maverick-17B-128E": "vLLM asks for the processor's files of Llama 4",
    "Llama-4-Scout-17B-16E": "vLLM asks for the processor's files of Llama 4",
    "MiMo-7B-Base": "its configuration class is remote code",
}
"""Entries of the table that vLLM cannot build here, and why."""
BUILT = [
    (name, tp) for name in TABLE if name not in NOT_BUILT for tp in ((1, 2, 4, 8) if name in MIXED else (1,))
]
"""Entries of the table, and on how many tensor-parallel ranks: where layers are alike, only heads are shared
out."""
FAMILIES_NOT_BUILT = {
    "hy_v3": "its class writes other names of its experts' keys than vLLM reads",
    "kimi_linear": "its class names no layers; Kimi-K3 of the table is built",
    "lfm2_moe": "its class names no layers; lfm2 is built",
    "llama4_text": "vLLM asks for the processor's files of Llama 4",
    "olmo_hybrid": "vLLM needs Triton for its recurrence",
    "step3p5": "its class has no sizes of its own",
    "zamba2": "its class leaves out what vLLM reads",
}
ALSO = ("architectures", "rope_parameters", "rope_scaling", "sparse_attention_config")
NOT_ALSO = ("attention_k_eq_v", "num_global_key_value_heads", "num_key_value_heads", "head_dim")
"""Keys of a family that say what else a file says, and keys that its models set or leave out."""
SMALLER = {"gemma3n_text": {"hidden_size": 256}, "minimax_m3_text": {"sparse_attention_config": None}}
"""What is built otherwise than the file has it and decides nothing: some must fit into memory."""
TYPES = {"minimax_m3": "minimax_m3_text"}
"""Model types of files whose language model vLLM calls otherwise."""
FAMILIES = [each for each in ARCHITECTURES if each not in FAMILIES_NOT_BUILT]


def for_vllm(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what does not decide what is kept, from the family's class."""
    config = {**config, "model_type": TYPES.get(config["model_type"], config["model_type"])}
    family = default_config(config["model_type"])
    rest = {
        name: value
        for name, value in family.items()
        if name in ALSO or not (isinstance(value, list | dict) or name in NOT_ALSO)
    }
    return {**rest, **config, **SMALLER.get(config["model_type"], {})}


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, int], dict[str, Any]]:
    """vLLM's answer for every family and every model of the table, by name and ranks."""
    asked = {
        (name, tp): for_vllm(config)
        for name, tp in [*BUILT, *((each, 1) for each in FAMILIES)]
        for config in [TABLE.get(name) or default_config(name)]
    }
    answers = ask((config, tp) for (_, tp), config in asked.items())
    return dict(zip(asked, answers, strict=True))


def theirs(layers: list[dict[str, Any]], count: int) -> Counter[Any]:
    """(layer, kind, attention span, heads, bytes of an entry or snapshot on rank 0, tokens of an entry)."""
    return Counter(
        (
            # What Falcon-H1 has beside attention is numbered on from the last layer.
            layer["layer"] % count,
            KINDS[layer["spec"]], layer.get("reach", 0), layer.get("heads", 0),
            layer["bytes"], layer.get("state_tokens", 1),
        )
        for layer in layers
        if layer.get("spec")
    )  # fmt: skip


def ours(config: dict[str, Any], tp: int) -> tuple[Counter[Any], int]:
    """The same, as it was read, and how many layers the model has."""
    reading = read_model(config)
    found: Counter[Any] = Counter()
    for number, stores in enumerate(per_layer(reading)):
        for store in stores:
            inside = page_interior(store, 1, 1, 0, tp)
            heads = 0 if inside.snapshot else inside.heads
            found[number, store.kind, store.attention_span, heads, inside.page_bytes, store.state_tokens] += 1
    return found, len(reading.kept)


@pytest.mark.parametrize(("name", "tp"), BUILT)
def test_a_model_of_the_table_keeps_what_vllm_builds(name, tp, built):
    answer = built[name, tp]
    if "must be divisible by tensor parallel size" in answer.get("error", ""):
        with pytest.raises(GeometryError, match=f"attention heads on {tp} tensor-parallel ranks"):
            lay_out(read_model(TABLE[name]).cache, shape(read_model(TABLE[name]), EngineSide(tp), 1))
        return
    assert "error" not in answer
    found, layers = ours(TABLE[name], tp)
    assert found == theirs(answer["layers"], layers)


SIDES = {
    "cuda L": EngineSide(layout="LBNHC"),
    "cuda B": EngineSide(layout="BLHNC"),
    # Blocks on CPUs have 128 tokens, unless state makes them larger.
    "cpu": EngineSide(block_tokens=128),
}
"""What is planned, by vLLM's set-up."""
ON_CPU = [name for name in MIXED if GroupKind.STATE in MIXED[name] and GroupKind.MLA not in MIXED[name]]
"""Hybrids of which vLLM's kernels for CPUs take the blocks: those for latents take 16 tokens only."""


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
def test_blocks_and_groups_are_those_that_vllm_derives(name, tp, setup, built):
    reading, side = read_model(TABLE[name]), replace(SIDES[setup], tp=tp)
    if "error" in built[name, tp]:
        assert "must be divisible by tensor parallel size" in built[name, tp]["error"]
        return
    theirs = built[name, tp]["groups"][setup]
    if isinstance(theirs, str):
        assert "page size is not divisible by the maximum page size" in theirs
        with pytest.raises(GeometryError, match="use BLHNC"):
            shape(reading, side, 1)
        return
    stores = reading.cache.layers
    found = Counter(
        (stores[group.layers[0]].kind, group.block_tokens, len(group.layers))
        for group in shape(reading, side, 1).groups
    )
    assert found == Counter((KINDS[spec], *rest) for group in theirs for spec, *rest in group)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_what_vllm_builds(name, built):
    answer = built[name, 1]
    assert "error" not in answer
    found, layers = ours(default_config(name), 1)
    assert found == theirs(answer["layers"], layers)
