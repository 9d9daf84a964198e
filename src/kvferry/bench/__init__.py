"""What people measure on their own machines: transfers, tiers, and the costs that the planner uses.

- `engines`: engines of a model that hold one request; `content`: what their blocks hold, to be told apart.
- `producer`, `link`: the other process, and our hold on it.
- `reader`, `steps`: the decode side, and what an engine's hooks do on every step.
- `raw`, `movers`: the ways of moving the same bytes that are compared; `rounds`: the comparison.
- `transfer`, `report`: one request, for people and as JSON.
- `contest`: kvferry against the limit; `chunks`, `host_tier`, `slow_tier`, `file_tier`, `raw_files`, `fio`,
  `object_tier`, `tiers`, `tiers_report`: the speed of every tier.
- `fit`, `calibrate`, `calibrate_report`: the costs of this machine.
"""
