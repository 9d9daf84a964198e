"""Forecasts of a KV cache handover and of what the tiers keep, before any engine runs.

- `find`: a model's ``config.json``, from a file, a folder, the built-in table or the hub.
- `side`: the shape of one engine from its flags; vLLM's choices replace missing flags.
- `setting`: the memory of both engines, and a hypothetical request with scattered block tables in it.
- `forecast`, `moved`, `cost`: the planner's result: bytes, descriptors, strategy and expected seconds.
- `snapshots`: the positions at which an engine leaves snapshots of recurrent state.
- `kept`, `choices`: the part of a prompt that the tiers keep, and the prefixes that another prompt can load.
- `show`, `show_kept`, `numbers`: both forecasts on a terminal and as JSON.
- `page`: a picture of the handover, as one HTML file.

This package has no formulas of its own for the transfer. The same code as for a real request lays out the
geometry, builds the templates, and selects and counts the cells.
"""
