"""The KV cache of every layer by a model's ``config.json``, and its memory layout in an engine.

- `config`: lookup of keys, which have different names in different model families.
- `families`: properties that a file may leave out, such as defaults and the kind of recurrence.
- `pattern`: the mixers of every layer.
- `attention`, `recurrent`: the cache of an attention layer and of a recurrent layer.
- `read`: the caches of all layers, as `store` describes them.
- `layout`: where an engine would keep them in memory. `interior`: the fields of a page there.

All sizes are those that vLLM 0.32 allocates.
"""

from kvferry.tools.models.read import ModelReading, per_layer, read_model

__all__ = ["ModelReading", "per_layer", "read_model"]
