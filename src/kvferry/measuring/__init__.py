"""Parts that measurements are built from; `bench`, `doctor` and the repository's benchmarks share them.

- `simulated`: engines reduced to their memory: shape, block tables and tokens of one request.
- `content`: fills their blocks with values that tell where each belongs, and compares memory with them.
- `producer_main`, `producer_process`: the process that is read from, and the handle on it.
- `reader`, `worker_steps`: the decode side, and the calls that an engine's hooks make on every step.
- `raw_reads`: NIXL without kvferry, over the same memory.
- `spread`: median, extremes and percentiles; `machine`: the machine that figures belong to.
"""
