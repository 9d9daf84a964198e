"""Readers of a model's ``config.json`` for the cache of every layer.

- `config`: the keys of a ``config.json``, by the names that different families give them.
- `families`: properties that families leave out of the file: defaults, and the kind of recurrence.
- `pattern`: the mixers of every layer.
- `attention`, `recurrent`: the cache of an attention layer and of a recurrent layer.
- `read`: the caches of all layers.

The sizes are those that vLLM 0.32 allocates.
"""

from kvferry.geometry.models.read import ModelReading, per_layer, read_model

__all__ = ["ModelReading", "per_layer", "read_model"]
