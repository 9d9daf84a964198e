"""What an engine says about its KV: facts that peers compare, and the namespace of its chunks."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.chunk import VERSION
from kvferry.transport.messages import Fact

WEIGHTS, MODEL_DTYPE, CACHE_DTYPE = "weights", "model dtype", "KV cache dtype"
"""Names of facts that every engine states. A peer compares a fact only if both engines state it."""


def namespace_of_facts(facts: Mapping[str, Fact], canonical: CanonicalForm, name: str) -> Namespace:
    """Return the namespace of an engine's chunks.

    Chunks of another engine are found only if it states the same facts, all of them.

    Args:
        facts: facts that the engine states to peers, `WEIGHTS`, `MODEL_DTYPE` and `CACHE_DTYPE` among them.
            Equal facts must mean equal KV bytes; the weights must be a digest of their content.
        canonical: form of the chunks.
        name: display name of the model; not compared.

    Raises:
        Unnameable: a fact has no exact text.
    """
    model = dict(facts)
    weights, dtype, kv_dtype = (str(model.pop(fact)) for fact in (WEIGHTS, MODEL_DTYPE, CACHE_DTYPE))
    return Namespace.of(
        weights=weights,
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales={},
        form=(f"chunk file, version {VERSION}", *canonical.describe()),
        name=name,
    )
