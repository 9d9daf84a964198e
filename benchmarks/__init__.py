"""Benchmarks of kvferry's own design: `python -m benchmarks --help`, from the root of the repository.

`overhead`, `layout`, `offload`, `choice`, `safety` and `redeem` hold one command each: `command` reads the
options, `measure` runs it, `report` prints the results for people and as JSON. `checkpoint` and `served` make
a model and an engine for those that need one, `object_server` runs an object store, and `phrases` formats
figures.

What people measure on their own machines is `kvferry bench`; the commands here use its parts.
"""
