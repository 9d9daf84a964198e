"""Building blocks of measurements, shared by `bench`, `doctor` and the repository's benchmarks.

- `simulated`: engines reduced to their memory: shape, block tables and tokens of one request.
- `content`: fills their blocks with values that identify their position, and compares memory with them.
- `producer_main`, `producer_process`: the process that is read from, and its handle.
- `reader`, `worker_steps`: the decode side, and the calls that an engine's hooks make on every step.
- `raw_reads`: NIXL without kvferry, over the same memory.
- `spread`: median, extremes and percentiles; `machine`: facts about this machine.
"""
