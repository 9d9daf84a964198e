"""vLLM's attention backends for GPUs, with the cache-write operation run on the CPU.

`pretend` makes them importable here, `emulated` stands for CUDA's operations, `layers` makes a layer with its
cache, `mutants` makes wrong adapters of right ones.
"""
