"""The tiered cache: host memory and storage put together.

`chunk_cache` is for the thread that schedules, with `fetch` (a load's chunks on their way to host memory),
`writing` (chunks that storage is still to get) and `tier_queue` (the threads that wait for storage).
`prompt_chunks` names a request's chunks. `weights` digests the weights that the content was computed with.
"""
