"""A mount whose calls never return, below the threads of a tier's queue."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from kvferry.cache.tier_queue import TierQueue
from support.chunk_files import key
from support.stores import GROUP, body, keep, open_store
from support.system_calls import Fault, How, counted, possible, run

pytestmark = [
    pytest.mark.long,  # it measures time; test_tier_queue shows the same with a clock
    pytest.mark.skipif(not possible(), reason="processes cannot be traced here"),
]


def work(path: Path, what: str) -> dict[str, object]:
    """Give a queue reads or writes on a mount that hangs, and go on meanwhile."""
    store = open_store(path)
    queue = TierQueue(store, "file", readers=2, writers=2, refresh_seconds=0.05, stuck_seconds=1.0)
    threads = threading.active_count()
    longest, stuck_after = 0.0, 0.0
    with counted():
        began = time.monotonic()
        for step in itertools.count():
            before = time.monotonic()
            known = queue.known([key(1)])[0]
            if what == "read" and known and step < 50:
                queue.reads.start(key(1), GROUP, body(1))
            if what == "write" and queue.can_write:
                queue.writes.start(key(100 + step), GROUP, body(1))
            queue.mark_used([key(1)])
            queue.done()
            longest = max(longest, time.monotonic() - before)
            if (queue.reads.stuck or queue.writes.stuck) and not stuck_after:
                stuck_after = time.monotonic() - began
            if time.monotonic() - began > 2.0:
                break
            time.sleep(0.01)
        under_way = queue.reads.count, queue.writes.count
        closing = time.monotonic()
        queue.close(0.2)
        closed = time.monotonic() - closing
        return {
            "longest": longest,
            "stuck": (queue.reads.stuck, queue.writes.stuck),
            "stuck_after": stuck_after,
            "known": bool(queue.known([key(1)])[0]),
            "under_way": under_way,
            "more threads": threading.active_count() - threads,
            "closed": closed,
        }


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("at", [1, 3, 8, 21])
def test_hanging_mount_delays_neither_steps_nor_shutdown(tmp_path, what, at):
    keep(open_store(tmp_path, capacity=1 << 24), 1)
    ended = run(lambda: work(tmp_path, what), Fault(at, How.HELD))
    assert len(ended.calls) >= at, "nothing hung"
    said = ended.said
    assert said["longest"] < 0.6, "a step waited until the tier counted as stuck"
    assert said["stuck"] == [what == "read", what == "write"]
    assert 0.6 < said["stuck_after"] < 3.0
    assert said["known"] is (what == "write"), "a tier that hangs for reading is asked"
    assert max(said["under_way"]) <= 50
    assert said["more threads"] <= 0
    assert said["closed"] < 3.0
