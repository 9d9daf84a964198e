"""Replay request traces against simulated engines and tiers, to predict hit rates, storage and latency.

The look-up, the choice of chunks to store and the eviction are the code that serves. Only time, memory and the
engine itself are simulated.

- `trace` reads traces: requests with arrival times, lengths and identities of their content. `workload` makes
  them up.
- `simulation` sends the requests to simulated engines (`engine`, `engine_cache`) with simulated tiers (`tiers`).
- `capacities` computes the hit rate for many capacities, and `sizing` the smallest one that reaches a hit rate.
- `workload` makes up traces of users who hold conversations.
"""
