"""The commands `kvferry bench`: transfers, tiers, and the costs that the planner uses.

- `movers`: ways to move the same bytes; `rounds`: their comparison, round by round.
- `transfer`, `report`: one request between two processes, for people and as JSON.
- `contest`: kvferry against the limit; `chunks`, `host_tier`, `slow_tier`, `file_tier`, `raw_files`, `fio`,
  `object_tier`, `tiers`, `tiers_report`: the speed of every tier.
- `fit`, `calibrate`, `calibrate_report`: the costs of this machine.
"""
