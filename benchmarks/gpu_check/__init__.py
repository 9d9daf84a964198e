"""Check and time KV on a GPU without an engine: READs, copies, order, host memory. One report.

`reads`, `copies`, `busy`, `host`, `order`, `content` and `expandable` are one check each. `job` has their
sizes, `result` what they return. `measure` runs them, and a check that fails does not keep the others from
running. With the device ``cpu``, memory of the CPU stands for the GPU's, to test the checks themselves.
"""
