"""Replay request traces against simulated engines and tiers, to predict hit rates, storage and latency.

The look-up, the choice of chunks to store and the eviction are the code that serves. Only time, memory and
the engine itself are simulated.

- `trace` reads traces or makes them up: requests with arrival times, lengths and identities of content.
- `arrivals` has the requests that wait for their time, or for the end of earlier ones.
- `simulation` sends the requests to simulated engines (`engine`) with tiers (`tiers`).
- `curve` computes the hit rate for many capacities, `sizing` the smallest that reaches a hit rate.
"""
