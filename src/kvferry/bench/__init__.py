"""Measurements a person can repeat: what a transfer reaches here, beside what the parts under it reach.

- `engines`: engines of a model that hold one request; `content`: what their blocks hold, to be told apart.
- `producer`, `link`: the other process, and our hold on it.
- `reader`, `steps`: the decode side, and what an engine's hooks do on every step.
- `raw`, `movers`: the ways of moving the same bytes that are compared; `rounds`: the comparison.
- `planning`, `hooks`: what a request costs the decode side besides.
- `transfer`, `report`: one request, for people and as JSON.
- `cells`, `layout`, `verdicts`, `layout_report`, `layout_plot`: layouts, sizes and strategies, likewise.
- `fit`, `calibrate`, `calibrate_report`: the costs of this machine.
"""
