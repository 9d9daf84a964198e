"""Benchmarks of kvferry's own design: `python -m benchmarks --help`, from the root of the repository.

Each folder is one command: `command` reads the options, `measure` runs the benchmark, and `report` prints
the results as text or JSON. `checkpoint` writes a model, `served` runs an engine in this process,
`engine_process` runs an engine in a process of its own, `object_server` runs an object store, and `phrases`
formats figures.

To measure their own machines, users run `kvferry bench`. The commands here use its modules.
"""
