"""Tiers, which keep chunks of KV cache.

A *chunk* is a fixed number of tokens of one KV cache group, in a form that does not depend on the engine that
wrote it. `host` keeps chunks in memory that the ranks of a node share. `files` keeps them in a directory that
several processes share, `objects` in object storage; both implement `storage_tier`. `format` defines the
bytes of a chunk, `paths` its name. `index` records the chunks that a tier has. `eviction` chooses the chunks
to evict when a tier is full. `admin` and `survey` serve an operator's commands.
"""
