"""Check and time KV on a GPU without an engine: READs, copies, order, host memory. One report.

`reads`, `copies`, `busy`, `host`, `order`, `content` and `expandable` are one check each. `job` holds their
sizes, and `result` their results. `measure` runs all checks, even if one fails. With the device
``cpu``, memory of the CPU stands for the GPU's, to test the checks themselves.
"""
