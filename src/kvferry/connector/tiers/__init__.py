"""KV in tiers: host memory, files and object stores.

`storing` stores chunks of running requests. `source` loads chunks for later requests.
"""
