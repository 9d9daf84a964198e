"""Forecasts of a KV cache handover and of the storage in the tiers, before any engine runs.

A *handover* is the transfer of one request's KV cache from one engine to another. The *tiers* are the host
memory and storage in which an engine keeps KV cache for later requests.

- `find`: finds a model's ``config.json`` in a file, a folder, the built-in table or the Hugging Face hub.
- `side`: derives the memory layout of one engine from its flags. Missing flags take vLLM's values.
- `setting`: lays out both engines in memory, with a made-up request whose blocks are scattered.
- `forecast`, `totals`, `cost`: forecast the bytes, descriptors, strategy and expected seconds of a handover.
- `snapshots`: computes the positions at which an engine leaves snapshots of recurrent state.
- `kept`, `choices`: forecast which parts of a prompt the tiers store and which prefixes can be loaded.
- `show`, `show_kept`, `numbers`: show both forecasts on a terminal and as JSON.
- `page`: draws the handover as one HTML file.

This package has no formulas of its own for the transfer. The code that serves real requests lays out the
geometry, builds the templates, and selects and counts the cells.
"""
