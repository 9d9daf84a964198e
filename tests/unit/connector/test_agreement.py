"""The namespace of an engine's chunks, from the facts that it states to peers."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.content import CACHE_DTYPE, MODEL_DTYPE, WEIGHTS, namespace_of_facts
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of
from kvferry.geometry.rank import GroupKind
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.chunk import VERSION
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField

FACTS = {
    WEIGHTS: "0123",
    MODEL_DTYPE: "bfloat16",
    CACHE_DTYPE: "fp8_e4m3",
    "quantization": "none",
    "model configuration": {"rope.theta": "10000"},
}


def form(chunk_tokens: int = 16) -> CanonicalForm:
    fields = (StoredField("k", 2, 2, (("content", 8),)),)
    model = ModelCache("tiny", (LayerCache(GroupKind.FULL, 0, fields),))
    return canonical_form_of(lay_out(model, EngineShape(1, (1,), 16, "LBNHC", 2)), chunk_tokens)


def namespace(facts: dict[str, Any] | None = None, chunk_tokens: int = 16, name: str = "tiny") -> Namespace:
    return namespace_of_facts(facts or FACTS, form(chunk_tokens), name)


def test_a_namespace_has_all_facts_and_the_version_of_the_chunk_file():
    facts = namespace().facts
    assert facts["weights"] == "0123"
    assert (facts["dtype"], facts["kv_dtype"]) == ("bfloat16", "fp8_e4m3")
    assert facts["model"] == {"quantization": "none", "model configuration": {"rope.theta": "10000"}}
    assert facts["form"] == [f"chunk file, version {VERSION}", *form().describe()]


@pytest.mark.parametrize("fact", FACTS)
def test_another_value_of_a_fact_is_another_namespace(fact):
    assert namespace({**FACTS, fact: "other"}) != namespace()


def test_another_form_is_another_namespace_but_another_name_is_not():
    assert namespace(chunk_tokens=32) != namespace()
    assert namespace(name="renamed") == namespace()


def test_the_facts_are_not_changed():
    before = dict(FACTS)
    namespace()
    assert before == FACTS
