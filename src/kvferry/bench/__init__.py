"""The commands `kvferry bench`: transfers, tiers, and the costs that the planner uses.

- `movers`: several methods to move the same bytes; `rounds`: their comparison, round by round.
- `transfer`, `transfer_report`: one request between two processes, for people and as JSON.
- `tier_cases`: kvferry and its limits for one tier; `rank_chunks`, `host_tier`, `storage_chunks`,
  `file_tier`, `raw_files`, `object_tier`: the cases of each tier; `tiers`, `tiers_report`: all tiers.
- `fit`, `calibrate`, `calibrate_report`: the costs of this machine.
"""
