"""Check and time KV on a GPU: READs, copies, order, host memory, and a pair of vLLM engines. One report.

`reads`, `copies`, `busy`, `host`, `order`, `content`, `expandable` and `pair` are one check each. `job` holds
their sizes, and `result` their results. `measure` runs all checks, even if one fails. With the device
``cpu``, memory of the CPU stands for the GPU's, to test the checks themselves.
"""
