"""The tiered KV cache of one engine: host memory in front of storage.

It keeps *chunks*: each is a fixed number of tokens of one KV cache group, or a *snapshot*, the recurrent
state at one position.

`chunk_cache` is the entry point, used by the engine's scheduling thread. It uses `reading` (reads from
storage), `fetch` (the chunks of one load on their way to host memory), `writing` (writes to storage) and
`tier_queue` (threads that block on storage). `prompt_chunks` computes the keys of a request's chunks.
`weights` digests the model weights, which are part of the scope of all keys.
"""
