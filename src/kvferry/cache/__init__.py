"""What is at hand, and what becomes of it when it does not come.

The tiered cache: `chunk_cache` for the thread that schedules, with `fetch` (a load's chunks on their way to
host memory), `writing` (what storage is owed) and `tier_queue` (the threads that wait for storage);
`prompt_chunks` names a request's chunks. Ranks copy between host memory and their blocks: `orders` are what
they are told, `mover` the thread that does it, `chunk_routes` how.

Loads from wherever: `loads` is the life of a load on a worker, `pins` who owns the memory meanwhile, `bids`
which source is asked. `weights` says whose weights the content was computed with.
"""
