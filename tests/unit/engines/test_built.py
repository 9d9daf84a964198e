"""Facts of built models: what decides content, and neither sizes nor places."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm import built
from kvferry.engines.vllm.built import Built, built_of
from kvferry.engines.vllm.compat.model import Models, built_models, draft_layer_names
from kvferry.keys.namespace import settings_of
from kvferry.transport.messages import MAX_NAMED, compare_facts
from support.played_worker import PlayedWorker


class Rotary(torch.nn.Module):
    """As vLLM's: a table by position, and what it was made of."""

    def __init__(self, base: float, rows: int, *, long: bool = False) -> None:
        super().__init__()
        self.base, self.max_position_embeddings, self.use_long_rope = base, rows, long
        angles = torch.arange(rows)[:, None] * base ** -(torch.arange(4) / 4)
        self.register_buffer("table", torch.cat((angles.cos(), angles.sin()), -1), persistent=False)


class Attention(torch.nn.Module):
    """A model's own: sizes of a rank, and a scaling."""

    def __init__(self, rotary: Rotary, heads: int, scaling: float) -> None:
        super().__init__()
        self.rotary, self.num_heads, self.scaling, self.prefix = rotary, heads, scaling, f"layers.{heads}"
        self.register_buffer("scratch", torch.rand(heads, 8), persistent=False)


class Model(torch.nn.Module):
    def __init__(self, layers: list[Attention], normalizer: float = 8.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.register_buffer("normalizer", torch.tensor(normalizer), persistent=False)


def facts(model: torch.nn.Module, monkeypatch: Any, **config: Any) -> Built:
    hf = SimpleNamespace(to_dict=lambda: config)
    monkeypatch.setattr(built, "built_models", lambda _: Models(model, None))
    return built_of(SimpleNamespace(model_config=SimpleNamespace(hf_config=hf)))


def model(base=1e4, rows=128, heads=4, scaling=0.5, normalizer=8.0, long=False) -> Model:
    return Model([Attention(Rotary(base, rows, long=long), heads, scaling) for _ in range(2)], normalizer)


def test_sizes_of_ranks_and_lengths_of_tables_are_no_facts(monkeypatch):
    one = facts(model(), monkeypatch)
    assert compare_facts(one.facts(), facts(model(rows=512, heads=2), monkeypatch).facts()) == []
    assert one.facts() == facts(model(rows=512, heads=2), monkeypatch).facts(), "nor of the namespace"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"long": True}, ["built model, Rotary.use_long_rope: false there, true here"]),
        ({"scaling": 0.25}, ["built model, Attention.scaling: 0.5 there, 0.25 here"]),
        ({"normalizer": 9.0}, ["built model, Model.normalizer: 8.000 there, 9.000 here"]),
    ],
)
def test_a_different_module_attribute_is_named_with_both_values(monkeypatch, changes, said):
    assert (
        compare_facts(facts(model(), monkeypatch).facts(), facts(model(**changes), monkeypatch).facts())
        == said
    )


def test_a_table_that_differs_alone_is_seen(monkeypatch):
    other = model()
    other.layers[1].rotary.table *= 1.1
    (said,) = compare_facts(facts(model(), monkeypatch).facts(), facts(other, monkeypatch).facts())
    assert said.startswith("built model, Rotary.table of 8: ")


@pytest.mark.parametrize("row", [1, 2, 63])
def test_a_table_that_differs_at_one_of_the_sampled_positions_is_seen(monkeypatch, row):
    other = model()
    other.layers[0].rotary.table[row] *= 1.1
    assert len(compare_facts(facts(model(), monkeypatch).facts(), facts(other, monkeypatch).facts())) == 1


@pytest.mark.parametrize("rows", [1, 63])
def test_a_table_that_is_too_short_to_be_sampled_is_no_fact(monkeypatch, rows):
    assert (
        compare_facts(facts(model(), monkeypatch).facts(), facts(model(rows=rows), monkeypatch).facts()) == []
    )


@pytest.mark.parametrize(
    "name",
    ["training", "cache_max_position_num", "use_flashinfer", "use_aiter", "enable_fp32_compute", "_own"],
)
def test_kernels_and_lengths_that_rotary_embeddings_keep_are_no_facts(monkeypatch, name):
    one, other = model(), model()
    for each, value in ((one, True), (other, False)):
        setattr(each.layers[0].rotary, name, value)
    assert facts(one, monkeypatch).facts() == facts(other, monkeypatch).facts()


def test_buffers_of_a_module_itself_and_whole_numbers_are_no_facts(monkeypatch):
    other = model()
    other.register_buffer("_own", torch.tensor(0.5))
    other.register_buffer("steps", torch.tensor(5))
    other.register_buffer("unmade", torch.empty((), device="meta"))
    other.size = 5
    assert facts(other, monkeypatch).facts() == facts(model(), monkeypatch).facts()


@pytest.mark.parametrize("number", [54321.678, -54321.678])
def test_digits_of_a_large_number_that_devices_round_differently_do_not_count(monkeypatch, number):
    one, near, other = (
        facts(model(normalizer=each), monkeypatch).facts() for each in (number, number + 0.01, number + 5)
    )
    assert one == near
    assert one != other


def test_values_that_differ_between_layers_have_a_fixed_order():
    """The order of a set is another one in every process."""
    values = frozenset(f"{number}" for number in range(9))
    assert Built({}, {"scale": values}).facts() == {"built model, scale": " | ".join(sorted(values))}


def test_last_bits_of_a_table_do_not_count(monkeypatch):
    other = model()
    other.layers[0].rotary.table *= 1 + 1e-7
    assert compare_facts(facts(model(), monkeypatch).facts(), facts(other, monkeypatch).facts()) == []


def test_stages_of_a_pipeline_together_are_the_whole_model(monkeypatch):
    local, everywhere = Attention(Rotary(1e4, 128), 4, 0.5), Attention(Rotary(1e6, 128), 4, 0.5)
    whole = facts(Model([local, everywhere]), monkeypatch, layers=2)
    stages = [facts(Model([layer]), monkeypatch, layers=2) for layer in (everywhere, local)]
    assert Built().with_other(stages[0]).with_other(stages[1]).facts() == whole.facts()


def test_settings_that_a_model_writes_into_its_configuration_are_facts_of_every_rank(monkeypatch):
    ranks = [facts(model(), monkeypatch, tuning=True) for _ in range(2)]
    assert ranks[0].with_other(ranks[1]).facts()["model configuration"] == {"tuning": "true"}


def engine_of(draft: bool = False, **layers: Any) -> SimpleNamespace:
    """As much of an engine's configuration as its models are found by."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=SimpleNamespace(uses_draft_kv_cache=lambda: draft),
    )


def test_the_models_of_an_engine_are_those_of_the_worker_with_its_layers():
    mine, draft, theirs = (torch.nn.Linear(1, 1) for _ in range(3))
    one, other, speculating = engine_of(a=mine), engine_of(a=mine), engine_of(draft=True, a=mine)
    workers = [
        PlayedWorker(one, mine),
        PlayedWorker(other, theirs, draft),
        PlayedWorker(speculating, mine, draft),
    ]
    assert built_models(one) == Models(mine, None)
    assert built_models(other) == Models(theirs, None), "a draft that keeps nothing is of no interest"
    assert built_models(speculating) == Models(mine, draft)
    del workers
    with pytest.raises(ConfigError, match="was not found in this process"):
        built_models(engine_of(a=mine))


def test_models_are_found_again_when_vllm_has_hidden_all_objects():
    model = torch.nn.Linear(1, 1)
    config, other = engine_of(a=model), engine_of(a=model)
    workers = PlayedWorker(config, model), PlayedWorker(other, model)
    assert built_models(config) == Models(model, None)
    gc.freeze()
    try:
        assert built_models(config) == Models(model, None)
        with pytest.raises(ConfigError, match="was not found"):
            built_models(other)
    finally:
        gc.unfreeze()
    del workers


def test_a_worker_that_was_found_is_not_looked_for_again(monkeypatch):
    model = torch.nn.Linear(1, 1)
    config = engine_of(a=model)
    worker = PlayedWorker(config, model)
    assert built_models(config) == Models(model, None)
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("all objects of the process were listed"))
    assert built_models(config) == Models(model, None)
    del worker


def test_layers_of_a_draft_are_those_that_it_does_not_share_with_the_target():
    own, shared, extra, drafts = (torch.nn.Linear(1, 1) for _ in range(4))
    config = engine_of(draft=True, own=own, shared=shared, extra=extra, draft0=drafts)
    target, draft = torch.nn.Sequential(own, shared), torch.nn.Sequential(shared, torch.nn.Sequential(drafts))
    worker = PlayedWorker(config, target, draft)
    assert draft_layer_names(config) == {"draft0"}
    config.speculative_config = None
    assert draft_layer_names(config) == set()
    del worker


def test_some_of_many_different_settings_are_named_and_the_rest_counted():
    one, other = ({"model configuration": {f"k{n}": str(n + m) for n in range(40)}} for m in (0, 1))
    said = compare_facts(one, other)
    assert said[0] == "model configuration: k0 is 0 there, 1 here"
    assert len(said) == MAX_NAMED + 1
    assert said[-1] == f"model configuration: {40 - MAX_NAMED} more settings differ"


def test_a_fact_of_one_side_alone_is_ignored_and_a_setting_refused():
    assert compare_facts({"a": "1"}, {"b": {"c": "2"}}) == []
    assert compare_facts({"b": {}}, {"b": {"c": "2"}}) == ["b: c is not set there, 2 here"]
    assert compare_facts({"b": "text"}, {"b": {"c": "2"}}) == ["b: text there, 1 settings here"]


def test_a_set_has_one_text_whatever_order_a_process_keeps_it_in():
    names = [f"layers.{number}" for number in range(9)]
    assert settings_of({"skipped": set(names)}) == settings_of({"skipped": names})
    assert settings_of({"deep": [frozenset(names)]}) == settings_of({"deep": [names]})


@pytest.mark.parametrize(
    "key",
    [
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "max_model_len",
        "eos_token_id",
        "temperature",
        "initializer_range",
        "num_lookahead_tokens",
    ],
)
def test_keys_that_decide_no_content_are_left_out_at_any_depth(key):
    assert settings_of({key: 1, "text_config": {key: 2, "layers": 3}}) == {"text_config.layers": "3"}


def test_a_setting_has_one_text_however_it_was_written():
    a = settings_of({"b": [1.0, {"c": 2.0, "d": (3,)}], "e": "text", "f": 0.5, "g": {"h": None}})
    assert a == settings_of({"f": 0.5, "e": "text", "b": (1, {"d": [3.0], "c": 2})})
    assert a == {"b": '[1, {"c": 2, "d": [3]}]', "e": "text", "f": "0.5"}
    assert settings_of({"a": 1e300, "b": True}) == {"a": "1e+300", "b": "true"}


def test_long_values_are_compared_by_a_digest():
    lists = [settings_of({"layers": list(range(n))})["layers"] for n in (200, 201)]
    assert lists[0] != lists[1]
    assert max(map(len, lists)) < 120
    many = [settings_of({f"k{n}": n * m for n in range(5000)}) for m in (1, 2)]
    assert len(many[0]) == 4097
    assert many[0] != many[1]


def test_objects_of_a_models_own_code_are_compared_by_what_they_hold():
    class Block:
        def __init__(self, heads):
            self.heads, self.names, self.itself = heads, {"b", "a"}, self

    class Closed:
        __slots__ = ("heads",)

    one, same, other = (
        settings_of({"blocks": [Block(heads), Closed()], "first": Block(heads), "kind": torch.int8})
        for heads in (2, 2, 4)
    )
    assert one == same
    assert (one["first.heads"], one["first.names"], one["kind"]) == ("2", '["a", "b"]', "torch.int8")
    assert "0x" not in str(one)
    assert {key for key in one if one[key] != other[key]} >= {"blocks", "first.heads"}
