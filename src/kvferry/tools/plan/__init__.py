"""Forecasts of a KV cache handover and of the storage in the tiers, before any engine runs.

- `find`: finds a model's ``config.json`` in a file, a folder, the built-in table or the Hugging Face hub.
- `side`: the memory layout of one engine from its flags. Missing flags take vLLM's values.
- `setting`: lays out both engines in memory, with a made-up request whose blocks are scattered.
- `forecast`: the bytes, descriptors, strategy and expected seconds of a handover.
- `blocks`: block sizes, and the positions at which an engine leaves snapshots of recurrent state.
- `kept`: which parts of a prompt the tiers store and which prefixes can be loaded.
- `show`: both forecasts on a terminal and as JSON. `page`: the handover as one HTML
  file.

This package has no formulas of its own for the transfer. The code that serves real requests lays out the
geometry, builds the templates, and selects and counts the cells.
"""
