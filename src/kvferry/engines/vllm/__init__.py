"""kvferry in vLLM: one out-of-tree KV connector, `connector.KVFerryConnector`.

A connector has two halves that never share memory. The scheduler half decides (`scheduler`, with
`producer` and `consumer`), the worker half moves (`worker`); `meta` is what they say to each other, once
per engine step. `geometry` and `content` describe the cache, `identity` says whose bytes they are, `offer`
is what travels with a request, `compat` holds what depends on vLLM's version.
"""
