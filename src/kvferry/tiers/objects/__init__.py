"""Object storage as `tiers.object_store` and an operator's commands use it.

`options` says which settings there are, `client` makes requests that end in time, `faults` puts into words
what came of those that failed, and `known` remembers which chunks are there.
"""
