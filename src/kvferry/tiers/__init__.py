"""Places where chunks of KV cache rest.

A *chunk* is a fixed number of tokens of one KV cache group, or of several, in a form that does not depend on
who wrote it. `slow` is what a tier in storage does; `format` and `decode` say how a chunk is a file, `image`
how it is one in memory; `file_store` keeps such files in a directory that several processes share, within a
capacity; `object_store` keeps the same files in object storage (`objects`), left alone while it fails
(`breaker`). A `cache` is either place as an operator sees it (`directory`, `objects.cache`; `survey`).
`host` keeps chunks in memory that the ranks of a node share (`arena`, accounted for by `book`); `eviction`
says what leaves when there is no more room.
"""
