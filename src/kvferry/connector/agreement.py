"""Facts about an engine's KV, which peers compare, and the namespace of chunk keys derived from them."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.geometry.canonical import CanonicalForm
from kvferry.keys.namespace import Namespace
from kvferry.tiers.format.chunk import VERSION
from kvferry.transport.messages import Fact

WEIGHTS, MODEL_DTYPE, CACHE_DTYPE = "weights", "model dtype", "KV cache dtype"
"""Names of the facts that every engine states. Peers compare a fact only if both engines state it."""


def namespace_of_facts(facts: Mapping[str, Fact], canonical: CanonicalForm, name: str) -> Namespace:
    """Return the namespace (scope) of the keys under which an engine stores its KV chunks.

    Two engines share chunks only if they have the same namespace, that is, if all their facts and their chunk
    formats are equal.

    Args:
        facts: properties of the engine that affect its KV, by name, including `WEIGHTS`, `MODEL_DTYPE` and
            `CACHE_DTYPE`. Engines with equal facts must compute equal KV. The value of `WEIGHTS` must be a
            digest of the weights.
        canonical: format in which chunks are stored.
        name: display name of the model; not compared.

    Raises:
        Unnameable: JSON cannot represent a fact exactly, or a required fact is an empty text.
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
