"""The engine-independent part of the connector: all decisions about loading, storing and offering KV cache.

An engine package adapts its own objects to the protocols in `engine`. Its hooks call the two halves of the
connector (`scheduler.SchedulerHalf`, `worker.WorkerHalf`), and carry `messages` between them once per
step.

- `admission` chooses the source of each request's prefix (`choosing`) by `bids`, and follows its loads
  (`blocks`). `source` is the interface of sources.
- `peers` reads KV from other engines and offers KV to them.
- `tiers` stores KV as chunks in host memory, files and object stores, and loads it again.
- `worker` carries out the orders on each rank, with the thread of its `mover`.
- `events` describe what happened, for listeners.
"""

from kvferry.common.lazy import lazy_names

__getattr__ = lazy_names(__name__, __file__)
