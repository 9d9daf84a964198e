"""Measurements a person can repeat: what a transfer reaches here, beside what the parts under it reach.

- `engines`: engines of a model that hold one request; `content`: what their blocks hold, to be told apart.
- `producer`, `link`: the other process, and our hold on it.
- `reader`, `steps`: the decode side, and what an engine's hooks do on every step.
- `raw`, `movers`: the ways of moving the same bytes that are compared; `rounds`: the comparison.
- `planning`, `hooks`: what a request costs the decode side besides; `peers`: what a new peer costs.
- `transfer`, `report`: one request, for people and as JSON.
- `cells`, `layout`, `verdicts`, `layout_report`, `layout_plot`: layouts, sizes and strategies, likewise.
- `contest`: ours against the limit; `chunks`, `host_tier`, `slow_tier`, `file_tier`, `raw_files`, `fio`,
  `object_tier`, `tier_speeds`, `speed_report`: the speed of every tier.
- `lookup`: looking for a prompt's chunks. `checkpoint`, `served`, `tier_hooks`, `first_token`,
  `engine_parts`, `engine_report`: what tiers cost and bring a real engine.
- `offload`, `offload_report`: all of that; `said`: words of several reports.
- `redeeming`, `redeem_report`: exchanging a ticket for block tables.
- `fit`, `calibrate`, `calibrate_report`: the costs of this machine.
"""
