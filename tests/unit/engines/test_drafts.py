"""Layers of a draft model carry a digest of the draft; tiers need to know its weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm import identity, identity as draft_models
from kvferry.engines.vllm.built import Built
from kvferry.engines.vllm.compat.model import keeps_draft_layers
from kvferry.engines.vllm.identity import draft_layers, draft_weights
from kvferry.geometry.canonical import canonical_form_of
from support.engines import ranks
from transport.cards import ATTENTION, spec

LAYER = "layers.1"
CACHE = SimpleNamespace(kv_cache_groups=[])


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Make a folder with weights of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(name: str, value: float) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file({"weight": np.full(4, value, np.float32)}, folder / "model.safetensors")
        return str(folder)

    return make


def model(folder: str, **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model=folder, model_weights="", revision=None, dtype="torch.float32", quantization=None,
        quantization_config=None, multimodal_config=None, is_multimodal_model=False, seed=0,
        served_model_name=None, hf_config=SimpleNamespace(to_dict=lambda: config),
    )  # fmt: skip


def engine(target: SimpleNamespace, draft: Any = None, method: str = "eagle") -> Any:
    """As much of an engine's configuration as its draft is told by."""
    speculative = SimpleNamespace(
        draft_model_config=draft, method=method, uses_draft_kv_cache=lambda: method != "ngram",
        draft_load_config=None,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=target,
        speculative_config=speculative if draft else None,
        load_config=SimpleNamespace(load_format="auto", ignore_patterns=[]),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        diffusion_config=None,
        additional_config={},
    )


@pytest.fixture
def digest(monkeypatch):
    """The digest that the only layer of a draft carries."""
    monkeypatch.setattr(draft_models, "draft_layer_names", lambda _: frozenset({LAYER}))

    def of(config: Any) -> str:
        ((name, found),) = draft_layers(config).items()
        assert name == LAYER
        return found

    return of


@pytest.fixture
def namespace(digest):
    """The digest of the namespace of an engine whose second layer is the draft's, if it has one."""

    def of(config: Any) -> str:
        agree = identity.must_agree(config, CACHE, Built())
        (rank,) = ranks(spec(), [ATTENTION] * 2)
        if keeps_draft_layers(config):
            (group,) = rank.groups
            own, last = group.layers
            group = replace(group, layers=(own, replace(last, draft=digest(config))))
            rank = replace(rank, groups=(group,))
        return identity.namespace_of(config, agree, canonical_form_of([rank], 16)).digest

    return of


def test_drafts_that_keep_other_values_have_other_digests(checkpoint, digest):
    target, one, same, other = (
        checkpoint(*each) for each in (("target", 0.0), ("one", 1.0), ("same", 1.0), ("other", 2.0))
    )
    base = digest(engine(model(target), model(one, rope={"theta": 1e4})))
    assert digest(engine(model(target), model(same, rope={"theta": 1e4}))) == base, "a path is not content"
    quantized = model(one, rope={"theta": 1e4})
    quantized.quantization = "fp8"
    rounded = model(one, rope={"theta": 1e4})
    rounded.dtype = "torch.bfloat16"
    found = [
        digest(engine(model(target), model(other, rope={"theta": 1e4}))),
        digest(engine(model(target), model(one, rope={"theta": 500.0}))),
        digest(engine(model(target), model(one, rope={"theta": 1e4}), method="eagle3")),
        digest(engine(model(target), quantized)),
        digest(engine(model(target), rounded)),
    ]
    assert len({base, *found}) == 1 + len(found)


def test_weights_of_a_draft_that_is_part_of_the_model_are_the_models(checkpoint):
    target = checkpoint("target", 0.0)
    assert draft_weights(engine(model(target), model(target), method="mtp")) == "the model's own"
    assert draft_weights(engine(model(target), model(target), method="ngram")) == ""
    assert draft_weights(engine(model(target))) == ""


def test_engines_with_other_drafts_have_the_same_facts(checkpoint):
    target, one, other = (checkpoint(name, float(n)) for n, name in enumerate("abc"))
    drafts = (None, model(one), model(other))
    facts = [identity.must_agree(engine(model(target), draft), CACHE, Built()) for draft in drafts]
    assert facts[0] == facts[1] == facts[2], "so that no peer refuses another for its draft"


def test_engines_with_other_drafts_have_chunks_of_their_own(checkpoint, namespace):
    target, one, other = (checkpoint(name, float(n)) for n, name in enumerate("abc"))
    plain, with_one, with_other = (
        namespace(engine(model(target), draft)) for draft in (None, model(one), model(other))
    )
    assert len({plain, with_one, with_other}) == 3
    assert namespace(engine(model(target), model(one))) == with_one


def test_ngrams_share_chunks_with_engines_that_do_not_speculate(checkpoint, namespace):
    target = checkpoint("target", 0.0)
    # vLLM gives the model's own configuration for the draft's.
    assert namespace(engine(model(target), model(target), method="ngram")) == namespace(engine(model(target)))


@pytest.mark.parametrize(
    ("draft", "load", "said"),
    [("nowhere/at-all", {}, "unverified nowhere/at-all"), ("one", {"load_format": "dummy"}, "dummy, seed 0")],
)
def test_tiers_refuse_a_draft_whose_weights_are_uncertain(checkpoint, namespace, draft, load, said):
    folder = checkpoint(draft, 1.0) if draft == "one" else draft
    config = engine(model(checkpoint("target", 0.0)), model(folder))
    if load:
        config.speculative_config.draft_load_config = SimpleNamespace(**load)
    with pytest.raises(ConfigError, match=f"tiers: the weights of the draft model are {said}"):
        namespace(config)
