"""Measurements a person can repeat: what a transfer reaches here, beside what the parts under it reach.

- `shapes`: a model's KV cache as a geometry, and block tables in it.
- `pool`: memory of that geometry, every page of which can be told from every other.
- `producer`, `link`: the other process, and our hold on it.
- `steps`: what an engine's hooks do on every step.
- `movers`: the ways of moving the same bytes that are compared.
- `rounds`: the comparison; `planning` and `hooks`: what a request costs the decode side besides.
- `report`: all of it, for people and as JSON.
"""
