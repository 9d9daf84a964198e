"""`kvferry bench`: measure transfers and tiers.

- `movers`: several methods to move the same bytes; `rounds`: comparison of movers, round by round.
- `transfer`, `transfer_report`: transfer of one request between two processes.
- `tier_cases`: comparison of kvferry with the limit of one tier; `rank_chunks`, `host_tier`,
  `storage_chunks`, `file_tier`, `raw_files`, `object_tier`: the cases of each tier; `tiers`, `tiers_report`:
  all tiers.
"""
