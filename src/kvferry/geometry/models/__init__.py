"""From a model's ``config.json`` to what every layer keeps.

- `config`: the keys of a ``config.json``, by the names that different families give them.
- `families`: what families leave unsaid: defaults, which kind of recurrence they have.
- `pattern`: which layer mixes tokens how.
- `attention`, `recurrent`: what a layer that does so keeps.
- `read`: all of it, for all layers.

The sizes are those that vLLM 0.32 allocates.
"""

from kvferry.geometry.models.read import ModelReading, model_cache, per_layer, read_model

__all__ = ["ModelReading", "model_cache", "per_layer", "read_model"]
