"""The connector without an engine: all decisions about loading, storing and offering KV cache.

An engine package adapts its own objects to the protocols in `engine`, calls the two halves from its hooks
(`scheduler.SchedulerHalf`, `worker.half.WorkerHalf`), and carries `messages` between them once per step.

- `admission` chooses the source of each request's prefix and follows its loads. Its parts are `bids`,
  `load_plans`, `policies`, `speeds`, `waiting`, `headroom`, `pins` and `part_blocks`. `source` is the
  interface of sources.
- `peers` reads KV from other engines and offers it to them.
- `tiers` stores and loads chunks.
- `worker` does the work on each rank.
- `events` are values that say what happened; a `stream` passes them to its listeners.
"""
