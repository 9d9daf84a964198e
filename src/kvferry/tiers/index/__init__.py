"""In-memory indexes of the chunks that each tier has, or had recently.

Every tier has a `tier_keys`: its entries in the `key_table` that all tiers of an engine share.
`recently_evicted` remembers keys that were evicted. `listed_keys` keeps the keys of a tier that learns its
content from listings of a directory or a bucket.
"""
