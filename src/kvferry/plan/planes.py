"""K and V as separate pages, as engines kept them before they packed both per head and token.

This layout shows the gain from packing, and gives the first column of public tables of I/O sizes.
"""

from __future__ import annotations

from dataclasses import replace

from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache


def apart(reading: ModelReading) -> tuple[ModelReading, dict[LayerCache, LayerCache]]:
    """Replace every layer that has both K and V by a layer for K and a layer for V.

    Returns:
        The new model, and for each kind of its layers the kind in `reading` that it is part of.
    """
    origin: dict[LayerCache, LayerCache] = {}
    parts: dict[LayerCache, tuple[LayerCache, ...]] = {}
    for store in dict.fromkeys(reading.cache.layers):
        names = dict.fromkeys(field.name.partition(".")[0] for field in store.fields)
        planes = [tuple(f for f in store.fields if f.name.partition(".")[0] == name) for name in names]
        parts[store] = (
            tuple(replace(store, fields=p) for p in planes) if set(names) == {"k", "v"} else (store,)
        )
        origin |= dict.fromkeys(parts[store], store)
    made = [[part for store in stores for part in parts[store]] for stores in per_layer(reading)]
    cache = replace(reading.cache, layers=tuple(part for layer in made for part in layer))
    return replace(reading, cache=cache, kept=tuple(map(len, made))), origin
