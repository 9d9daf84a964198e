"""Which chunks each tier has, and had recently, answered from memory.

`tier_keys` is what every tier keeps, in a `key_table` that the tiers of an engine share. `recently_evicted`
remembers keys that left. `listed_keys` keeps the keys of a tier that learns its content from listings.
"""
