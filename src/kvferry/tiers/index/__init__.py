"""Indexes of the chunks that each tier has, and had recently, in memory.

Every tier keeps `tier_keys`, in a `key_table` that the tiers of an engine share. `recently_evicted` remembers
keys that left. `listed_keys` keeps the keys of a tier that learns its content from listings.
"""
