"""What is read from a config.json is what a real engine keeps, layer by layer and group by group."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvferry.geometry import GroupKind
from kvferry.tools.models import per_layer, read_model
from kvferry.tools.plan.side import EngineSide, shape
from kvferry.tools.serving.tiny import FAMILIES
from support.vllm_engine.checkpoints import checkpoint_of, family_of
from support.vllm_engine.process import Engine

KINDS = {
    "full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.SLIDING,
    "chunked_local_attention": GroupKind.CHUNKED,
    "mla_attention": GroupKind.MLA,
    "mamba": GroupKind.STATE,
}
REPRESENTATIVE = ("nemotronh",)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.parametrize(
        "family",
        [
            pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.long)
            for name in (*FAMILIES, "qwen3_5")
        ],
    ),
]


def test_engine_caches_the_layers_read_from_the_config(
    family: str, checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoint_of(family, checkpoints)
    # Unless it is named, vLLM for CPUs chooses the dtype of a gated delta net's state by the processor.
    named = {"mamba_ssm_cache_dtype": "float32"} if family == "qwen3next" else {}
    options = family_of(family).engine_options() | named
    engine = Engine(tmp_path / "log", model=str(model), **options)
    try:
        engine.ready()
        theirs = engine.call("kept")
    finally:
        engine.close()

    config = json.loads((model / "config.json").read_text()) | named
    reading = read_model(config, options["dtype"])
    ours = {
        (number, store.kind, store.attention_span, store.whole_bytes)
        for number, stores in enumerate(per_layer(reading))
        for store in stores
    }
    assert ours == {
        (_number(name, len(reading.kept)), KINDS[kind], attention_span, size)
        for group in theirs
        for name, kind, attention_span, size in group
    }
    groups = shape(reading, EngineSide(), 1).groups
    assert Counter(len(group.layers) for group in groups) == Counter(map(len, theirs))


def _number(name: str, layers: int) -> int:
    """Of a layer; what Falcon-H1 has beside attention is numbered on from the last layer."""
    return int(re.search(r"\.(\d+)\.", name).group(1)) % layers
