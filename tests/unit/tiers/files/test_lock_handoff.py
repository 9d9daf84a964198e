"""A lock that threads hand on and processes compete for."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from multiprocessing import get_context

import pytest

from kvferry.tiers.files.ledger import Ledger, LockTimeout
from support.waiting import wait_for


class Lock:
    """What is had: counts how often it was got and given back, and by how many at once."""

    def __init__(self):
        self.got, self.given, self.now = 0, 0, 0

    def get(self, deadline):
        self.got += 1
        self.now += 1
        assert self.now == 1
        return self

    def give(self):
        self.given += 1
        self.now -= 1


class Clock:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Handed(Ledger):
    def __init__(self, get, clock):
        super().__init__("/the", 30, clock, clock.sleep)
        self._get = get

    def _take(self, deadline):
        return self._get(deadline)

    def _release(self, held_ledger):
        held_ledger.give()


@pytest.fixture
def lock():
    return Lock()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def relay(lock, clock):
    return Handed(lock.get, clock)


def queued(relay, threads, work):
    """Let threads queue up while this one has it; each then does `work` while it has it."""

    def have(number):
        with relay.held(30):
            work(number)

    waiting = [threading.Thread(target=have, args=(number,)) for number in range(threads)]
    with relay.held(30):
        for one in waiting:
            one.start()
        wait_for(lambda: relay.waiting == threads)
    for one in waiting:
        one.join()


def test_lock_is_released_if_no_thread_waits(relay, lock):
    for times in (1, 2):
        with relay.held(1) as had:
            assert had is lock
            assert (lock.got, lock.given) == (times, times - 1)
        assert lock.given == times


def test_threads_hand_it_on_one_at_a_time(relay, lock):
    inside, most = [], []

    def work(number):
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(number)

    queued(relay, 8, work)
    assert most == [1] * 8
    assert (lock.got, lock.given) == (1, 1)


def test_lock_held_for_long_is_left_to_other_processes_for_a_moment(relay, lock, clock):
    def work(_number):
        clock.now += 0.009

    queued(relay, 8, work)
    # It is had at once, by three more while it is not for longer than 20 ms, and so on.
    assert lock.got == lock.given == 3
    assert clock.slept == [0.002, 0.002]


def test_thread_that_fails_hands_the_lock_on_unharmed(relay, lock):
    def have():
        with suppress(ConnectionError), relay.held(30):
            raise ConnectionError

    waiting = [threading.Thread(target=have) for _ in range(3)]
    with relay.held(30):
        for one in waiting:
            one.start()
        wait_for(lambda: relay.waiting == 3)
    for one in waiting:
        one.join()
    # The first of them was handed it.
    assert (lock.got, lock.given) == (3, 3)


def test_failed_acquisition_leaves_the_lock_free(lock, clock):
    def get(deadline):
        if lock.got == 0:
            lock.got += 1
            raise LockTimeout("other processes")
        return lock.get(deadline)

    relay = Handed(get, clock)
    with pytest.raises(LockTimeout, match="other processes"), relay.held(1):
        pass
    with relay.held(1) as had:
        assert had is lock


def test_waiting_too_long_raises_and_leaves_no_waiter(relay, lock):
    done = []

    def late():
        try:
            with relay.held(0.01):
                pass
        except LockTimeout as busy:
            done.append(str(busy))

    thread = threading.Thread(target=late)
    with relay.held(1):
        thread.start()
        thread.join()
    assert done == ["/the/ledger was held by this process for 0.01 s"]
    assert (lock.got, lock.given) == (1, 1)


def test_a_forked_process_does_not_have_what_a_thread_of_its_parent_has(relay, lock):
    def child():
        with relay.held(1):
            os._exit(7 if (lock.got, lock.given) == (2, 1) else 1)

    with relay.held(1):
        forked = get_context("fork").Process(target=child)
        forked.start()
        forked.join()
    assert forked.exitcode == 7
