"""Replay request traces against simulated engines and tiers, to predict hit rates, storage and latency.

The look-up, the choice of chunks to store and the eviction are the code that serves (`planning`,
`tiers.eviction`). Only time, memory and the engine itself are simulated.

- `trace` reads traces: requests with arrival times, lengths and identities of their content.
- `workload` makes up traces of users who hold conversations.
"""
