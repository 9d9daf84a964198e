"""The tiered cache: host memory in front of storage.

`chunk_cache` serves the engine's scheduling thread. It uses `reading` (reads from storage), `fetch` (a load's
chunks on their way to host memory), `writing` (writes to storage) and `tier_queue` (threads that wait for
storage). `prompt_chunks` names a request's chunks. `weights` digests the weights that the content was
computed with.
"""
