"""Places where chunks of KV cache rest.

A *chunk* is a fixed number of tokens of one KV cache group, or of several, in a form that does not depend on
who wrote it. `format` and `decode` say how a chunk is a file; `file_store` keeps such files in a directory
that several processes share, within a capacity; `survey` and `upkeep` are what an operator sees and does.
`host` keeps chunks in memory that the ranks of a node share (`arena`, accounted for by `book`); `eviction`
says what leaves when there is no more room.
"""
