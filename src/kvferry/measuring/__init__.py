"""Building blocks of measurements, shared by `bench`, `doctor` and the repository's benchmarks.

- `simulated`: engines without a model: only KV cache memory and the block tables of one request.
- `content`: test values for blocks, which identify their position, and comparison of memory.
- `producer_main`, `producer_process`: the process that is read from, and a handle to it.
- `reader`, `worker_steps`: the side that reads, and the calls that a worker makes in every engine step.
- `raw_reads`: READs by NIXL without kvferry, between the same memory.
- `rounds`: measured functions, in turns; `fit`, `calibrate`: the costs that the transfer planner uses.
- `spread`: median, extremes and percentiles; `machine`: facts about this machine.
"""
