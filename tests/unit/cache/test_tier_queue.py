"""Threads in front of a slow tier: what they do is heard of, and one that hangs hangs alone."""

from __future__ import annotations

import threading

import pytest

from kvferry.cache.tier_queue import STUCK_SECONDS, Ended, TierQueue
from kvferry.tiers.files.chunk_file import whole_pages
from kvferry.tiers.names import GetOutcome, PutOutcome
from support.chunk_files import key
from support.clock import Clock
from support.slow_tiers import FakeTier, answer, queue_by_hand
from support.stores import GROUP, body, file_of, open_store, sections
from support.waiting import wait_for

KEY = key(1)


class Gate(FakeTier):
    """Answers when it is opened."""

    def __init__(self) -> None:
        super().__init__("gate")
        self.opened = threading.Event()

    def get(self, *_):
        self.opened.wait(60)
        return GetOutcome.ABSENT

    def put(self, *_):
        self.opened.wait(60)
        return PutOutcome.BUSY


def heard(queue, count):
    """What has ended, once so many have."""
    found = []
    wait_for(lambda: found.extend(queue.done()) or len(found) >= count)
    assert len(found) == count
    return sorted(found, key=lambda done: (isinstance(done.what, GetOutcome), done.key))


def test_chunks_go_to_files_and_come_back(tmp_path):
    queue = TierQueue(open_store(tmp_path, capacity=1 << 20), "file")
    stored = [body(number) for number in range(6)]
    for number, one in enumerate(stored):
        queue.writes.start(key(number), GROUP, one)
    assert {done.what for done in heard(queue, 6)} == {PutOutcome.STORED}
    assert queue.known([key(number) for number in range(7)]).tolist() == [True] * 6 + [False]
    into = [whole_pages(len(one)) for one in stored]
    for number, one in enumerate(into):
        queue.reads.start(key(number), GROUP, one)
    assert {done.what for done in heard(queue, 6)} == {GetOutcome.HIT}
    for one, other in zip(stored, into, strict=True):
        assert sections(GROUP, one) == sections(GROUP, other)
    assert queue.reads.count == queue.writes.count == 0
    queue.close(5)


def test_a_damaged_file_is_a_miss_and_known_no_more(tmp_path):
    queue = TierQueue(open_store(tmp_path, capacity=1 << 20), "file")
    queue.writes.start(KEY, GROUP, body(1))
    heard(queue, 1)
    path = file_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    queue.reads.start(KEY, GROUP, whole_pages(len(body(1))))
    assert heard(queue, 1) == [Ended(KEY, GetOutcome.CORRUPT)]
    assert not queue.known([KEY])[0]
    queue.close(5)


def test_exception_of_a_tier_is_an_io_error(caplog):
    queue = queue_by_hand(FakeTier("file"), Clock())
    queue.reads.start(KEY, GROUP, memoryview(bytearray(1)))
    queue.writes.start(KEY, GROUP, memoryview(bytearray(1)))
    answer(queue, "read", KEY, RuntimeError)
    answer(queue, "write", KEY, RuntimeError)
    assert queue.done() == [Ended(KEY, GetOutcome.IO_ERROR), Ended(KEY, PutOutcome.IO_ERROR)]
    assert [record.getMessage() for record in caplog.records] == [
        f"file tier: {what} of {KEY.hex()}" for what in ("fetch", "store")
    ]


def reading(*keys):
    clock = Clock()
    queue = queue_by_hand(FakeTier("file", [(KEY, b"1")]), clock, writers=1)
    for one in keys:
        queue.reads.start(one, GROUP, memoryview(bytearray(1)))
    return queue, clock


def test_tier_is_stuck_until_an_operation_ends():
    queue, clock = reading(key(2), key(3))
    clock.now += STUCK_SECONDS
    assert not queue.reads.stuck
    assert queue.known([KEY])[0]
    clock.now += 0.1
    assert queue.reads.stuck
    assert not queue.known([KEY])[0]
    assert queue.can_write, "writing may go on where reading hangs"
    answer(queue, "read", key(2), GetOutcome.ABSENT)
    assert not queue.reads.stuck
    clock.now += STUCK_SECONDS + 1
    assert queue.reads.stuck, "the other is still under way"


def test_a_tier_that_is_only_slow_is_not_stuck():
    queue, clock = reading(*map(key, range(2, 6)))
    for number in range(2, 6):
        clock.now += STUCK_SECONDS - 1
        assert not queue.reads.stuck
        answer(queue, "read", key(number), GetOutcome.ABSENT)
        queue.done()


def test_a_tier_that_was_long_idle_is_not_stuck_with_its_next_operation():
    queue, clock = reading()
    clock.now += 1000
    assert not queue.reads.stuck
    queue.reads.start(key(2), GROUP, memoryview(bytearray(1)))
    queue.writes.start(key(2), GROUP, memoryview(b"1"))
    assert not queue.reads.stuck
    assert not queue.writes.stuck
    clock.now += STUCK_SECONDS + 1
    assert queue.writes.stuck
    assert not queue.can_write


@pytest.mark.parametrize("listen", [False, True])
def test_operations_that_end_while_the_engine_sleeps_leave_the_tier_unstuck(listen):
    queue, clock = reading(key(2), key(3))
    answer(queue, "read", key(2), GetOutcome.ABSENT)
    clock.now += STUCK_SECONDS - 1
    answer(queue, "read", key(3), GetOutcome.ABSENT)
    clock.now += 1000
    if listen:
        queue.done()
    assert not queue.reads.stuck
    assert queue.known([KEY])[0]
    queue.reads.start(key(4), GROUP, memoryview(bytearray(1)))
    assert not queue.reads.stuck


def test_there_is_room_for_four_stores_a_thread():
    queue, _ = reading()
    for number in range(4):
        assert queue.can_write
        queue.writes.start(key(number), GROUP, memoryview(b"1"))
    assert not queue.can_write
    answer(queue, "write", key(2), PutOutcome.STORED)
    assert not queue.can_write, "it is heard of with done()"
    queue.done()
    assert queue.can_write


def test_closing_waits_no_longer_than_it_may_for_a_thread_that_hangs(caplog):
    tier = Gate()
    queue = TierQueue(tier, "gate", readers=1, writers=1)
    queue.reads.start(KEY, GROUP, memoryview(bytearray(1)))
    queue.close(0.2)
    assert queue.reads.count == 1, "the read has not ended"
    assert not tier.closed, "an operation is under way"
    assert "gate tier: a read or write has not ended 0.2 s after the engine began to stop" in caplog.text
    tier.opened.set()
    assert heard(queue, 1) == [Ended(KEY, GetOutcome.ABSENT)]


def test_closing_writes_what_was_given_and_closes_the_tier():
    tier = FakeTier("file")
    queue = TierQueue(tier, "file", readers=1, writers=1)
    for number in range(9):
        queue.writes.start(key(number), GROUP, memoryview(b"%d" % number))
    queue.close(5)
    assert tier.kept == {key(number): b"%d" % number for number in range(9)}
    assert tier.closed


def test_refresh_marks_used_chunks_the_last_of_a_prompt_first():
    uses = []

    class Noting(FakeTier):
        def mark_used(self, keys):
            uses.append(keys)

    queue = TierQueue(Noting("file"), "file", readers=1, writers=1, refresh_seconds=60)
    queue.mark_used([b"beginning", b"one", b"its end"])
    queue.mark_used([b"other"])
    queue.mark_used([b"beginning", b"two"])
    queue.close(5)
    assert uses == [[b"its end", b"one", b"other", b"two", b"beginning"]]


def test_tier_that_cannot_mark_used_chunks_goes_on(caplog):
    class Failing(FakeTier):
        def mark_used(self, keys):
            raise OSError("the mount has gone")

    queue = TierQueue(Failing("file"), "file", readers=1, writers=1)
    queue.mark_used([KEY])
    queue.close(5)
    assert "file tier: what was used" in caplog.text
    assert queue.tier.closed


def test_a_tier_is_refreshed_every_now_and_then_whatever_it_raises(caplog):
    refreshed = threading.Semaphore(0)

    class Failing(FakeTier):
        def refresh(self):
            refreshed.release()
            raise OSError("the mount has gone")

    queue = TierQueue(Failing("file"), "file", readers=1, writers=1, refresh_seconds=0.001)
    for _ in range(3):
        assert refreshed.acquire(timeout=60)
    queue.close(5)
    assert "file tier: refresh" in caplog.text
