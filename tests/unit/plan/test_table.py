"""The built-in table of models."""

from __future__ import annotations

import pytest

from kvferry.planning.strategy import Costs
from kvferry.tools.models import read_model
from kvferry.tools.plan.find import entries, lookup, nearest
from kvferry.tools.plan.forecast import Pricing, forecast
from kvferry.tools.plan.side import EngineSide, resolve_layout

BYTES_PER_TOKEN = {
    # K and V of all layers in bfloat16, computed by hand; state not counted.
    "Llama-3.1-8B": 32 * 2 * 8 * 128 * 2,
    "DeepSeek-V3": 61 * 576 * 2,
    "DeepSeek-V3.2": 61 * (576 * 2 + 132),
    "gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
    "gemma-3-27b-it": 62 * 2 * 16 * 128 * 2,
    "MiMo-V2-Flash": 9 * 4 * 320 * 2 + 39 * 8 * 320 * 2,
    "Llama-4-Scout-17B-16E": 48 * 2 * 8 * 128 * 2,
    "Qwen3-Next-80B-A3B": 12 * 2 * 2 * 256 * 2,
    "Nemotron-H-56B-Base-8K": 10 * 2 * 8 * 128 * 2,
    "Kimi-K3": 24 * 576 * 2,
}
STATE_BYTES = {
    # Convolution inputs of three tokens, then a matrix per head.
    "Qwen3-Next-80B-A3B": 36 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2),
    "Nemotron-H-56B-Base-8K": 54 * (3 * (256 * 64 + 2 * 8 * 256) * 2 + 256 * 64 * 256 * 4),
    "Kimi-K3": 69 * (3 * 3 * 96 * 128 * 2 + 96 * 128 * 128 * 4),
    "Jamba-v0.1": 28 * (3 * 8192 * 2 + 8192 * 16 * 2),
    "Falcon-H1-7B": 44 * (3 * (3072 + 2 * 256) * 2 + 24 * 128 * 256 * 2),
}


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_entry_can_be_planned_and_names_its_source(entry):
    reading = read_model(entry.config, name=entry.name)
    side = EngineSide(layout=resolve_layout("auto", reading))
    made = forecast(reading, (side, side), 4096, Pricing(Costs()))
    assert made.whole.bytes > 0
    assert made.token_bytes == BYTES_PER_TOKEN.get(entry.name, made.token_bytes)
    assert made.state_bytes == STATE_BYTES.get(entry.name, made.state_bytes)
    assert "github.com/" in entry.source or " on PyPI, " in entry.source


@pytest.mark.parametrize("name", ["Mistral-7B-Instruct-v0.2", "Mistral-Small-24B-Instruct-2501"])
def test_a_mistral_whose_file_says_that_it_has_no_window_has_none(name):
    assert {layer.attention_span for layer in read_model(lookup(name).config).cache.layers} == {0}


def test_the_sizes_that_were_computed_are_of_models_in_the_table():
    names = {entry.name for entry in entries()}
    assert len(names) >= 20
    assert {*BYTES_PER_TOKEN, *STATE_BYTES} <= names


def test_no_name_stands_for_two_models():
    every = [name.lower() for entry in entries() for name in (entry.name, *entry.also)]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "LLAMA-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "Meta-Llama-3.1-8B"]
)
def test_a_model_is_found_by_any_of_its_names_in_any_case(name):
    assert lookup(name).name == "Llama-3.1-8B"


def test_names_nearby_are_suggested():
    assert nearest("lama-3.1-8b")[0] == "Llama-3.1-8B"
    assert nearest("zzzzzz") == []
    assert nearest("meta-llama/Foo-7B") == [], "a family is not suggested for its size"
    assert lookup("lama-3.1-8b") is None
