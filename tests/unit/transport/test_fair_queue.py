"""What waits for the engine: bounded, and nobody's messages push out another's."""

from collections import Counter, deque

import pytest

from kvferry.transport.control_server import FairQueue
from support.locked import locked


def test_messages_are_taken_in_their_order():
    inbox = FairQueue()
    for sender, message in [(b"a", "1"), (b"b", "2"), (b"a", "3")]:
        assert inbox.put(sender, message)
    assert list(inbox) == ["1", "2", "3"]
    assert [inbox.popleft() for _ in range(3)] == ["1", "2", "3"]
    assert not inbox
    with pytest.raises(IndexError):
        inbox.popleft()


def test_a_sender_that_floods_loses_its_own_messages_and_no_others():
    inbox = FairQueue(per_sender=4, total=100)
    for number in range(1000):
        inbox.put(b"flood", number)
    assert inbox.put(b"honest", -1)
    assert list(inbox) == [0, 1, 2, 3, -1]
    assert inbox.dropped == 996
    inbox.popleft()
    assert inbox.put(b"flood", 1000)


def test_forced_messages_are_taken_beyond_the_limits():
    inbox = FairQueue(per_sender=2, total=3)
    for sender in (b"a", b"a", b"b"):
        assert inbox.put(sender, "beat")
    assert not inbox.put(b"a", "beat")
    assert inbox.put(b"a", "release", force=True)
    assert list(inbox) == ["beat"] * 3 + ["release"]
    assert inbox.dropped == 1


def test_made_up_senders_do_not_make_it_grow():
    inbox = FairQueue(per_sender=4, total=10)
    for number in range(1000):
        inbox.put(str(number).encode(), number)
    assert len(inbox) == 10
    assert len(inbox._of) == 10
    while inbox:
        inbox.popleft()
    assert len(inbox._of) == 0


def test_both_threads_use_it_under_its_lock_alone():
    """A sender that is counted wrongly once loses messages for good."""
    inbox = FairQueue()
    inbox._waiting, inbox._of = locked(deque, inbox._lock), locked(Counter, inbox._lock)
    inbox.put(b"a", "1")
    assert inbox.popleft() == "1"
