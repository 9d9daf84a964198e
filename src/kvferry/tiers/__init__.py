"""Tiers: places that keep chunks of KV cache.

A *chunk* is a fixed number of tokens of one KV cache group, or a *snapshot*, the recurrent state at one
position. Its bytes do not depend on the engine that wrote it.

`host` keeps chunks in memory that the ranks of a node share. `files` keeps them in a directory, and `objects`
in object storage; several processes can share either. Both implement the protocol in `storage_tier`.
`format` defines the bytes of a chunk, and `paths` its file name. `index` records which chunks a tier has.
`eviction` chooses the chunks to evict when the host tier is full. `admin` and `survey` implement operator
commands.
"""
