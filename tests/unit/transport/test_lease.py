"""Leases: who may read which blocks until when."""

import random

import pytest

from kvferry.common.errors import TransferError
from kvferry.transport.lease import LeaseBook, LeaseWord, LeaseWords, new_incarnation
from support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def book(clock) -> LeaseBook:
    return LeaseBook(incarnation=7, slots=2, seconds=30.0, clock=clock)


def test_two_leases_have_two_slots(book):
    first, second = book.grant("a"), book.grant("b")
    assert {first.slot, second.slot} == {0, 1}
    assert first.incarnation == second.incarnation == 7
    assert len(book) == 2


def test_no_slot_left_is_an_error_that_names_what_to_change(book):
    book.grant("a")
    book.grant("b")
    with pytest.raises(TransferError, match=r"all 2 lease slots .* lease_seconds \(30\)"):
        book.grant("c")


def test_a_lease_that_ends_keeps_its_slot_until_all_workers_have_raised_the_word(book):
    lease = book.grant("a")
    book.grant("b")
    assert book.end(["a"]) == {"a": lease.slot}
    with pytest.raises(TransferError):
        book.grant("c")
    book.ended("a")
    assert book.grant("c").slot == lease.slot


def test_a_slot_that_is_used_again_has_another_generation(book):
    book.grant("keeps the other slot")
    leases = []
    for name in ("a", "b", "c"):
        leases.append(book.grant(name))
        book.end([name])
        book.ended(name)
    assert len({lease.slot for lease in leases}) == 1
    assert len({lease.word(1) for lease in leases}) == 3


def test_a_lease_runs_out_when_its_time_is_up_and_not_before(book, clock):
    lease = book.grant("a")
    clock.now += 29.999
    assert book.end_expired() == {}
    clock.now += 0.001
    assert book.end_expired() == {"a": lease.slot}
    assert book.expired == 1
    assert book.end_expired() == {}, "a lease ends once"


def test_a_heartbeat_makes_a_lease_run_from_now_again(book, clock):
    book.grant("a")
    book.grant("b")
    clock.now += 20
    book.extend(["a", "never heard of"])
    clock.now += 20
    assert book.end_expired().keys() == {"b"}
    clock.now += 10
    assert book.end_expired().keys() == {"a"}


def test_a_lease_is_unclaimed_until_its_consumers_first_sign_of_life(book, clock):
    book.grant("a")
    clock.now += 5
    book.grant("b")
    clock.now += 5
    assert book.unclaimed(5) == ["a", "b"]
    assert book.unclaimed(5.001) == ["a"]
    book.extend(["a"])
    assert book.unclaimed(0) == ["b"]
    book.end(["b"])
    assert book.unclaimed(0) == []


def test_releasing_twice_or_what_is_not_held_ends_nothing(book):
    book.grant("a")
    assert book.end(["a", "b"]).keys() == {"a"}
    assert book.end(["a"]) == {}
    book.ended("a")
    book.ended("a")
    assert len(book) == 0
    assert {book.grant("c").slot, book.grant("d").slot} == {0, 1}, "a slot is not free twice"


def test_a_heartbeat_does_not_bring_an_ending_lease_back(book, clock):
    book.grant("a")
    book.end(["a"])
    book.extend(["a"])
    clock.now += 100
    assert book.end_expired() == {}


def test_a_word_is_the_tickets_until_it_is_raised():
    words, book = LeaseWords(9, 4), LeaseBook(7, 4, 30.0, Clock())
    lease, other = book.grant("a"), book.grant("b")
    assert int(words.array[lease.slot]) == lease.word(9)
    words.end([lease.slot])
    assert int(words.array[lease.slot]) != lease.word(9)
    assert int(words.array[other.slot]) == other.word(9)


def test_words_and_book_keep_in_step_over_many_leases():
    words, book = LeaseWords(9, 1), LeaseBook(7, 1, 30.0, Clock())
    for _ in range(5):
        lease = book.grant("a")
        assert int(words.array[0]) == lease.word(9)
        words.end(book.end(["a"]).values())
        book.ended("a")


def test_the_books_generation_wraps_as_the_words_do(book):
    book._generations = [(1 << 32) - 1] * 2
    book.grant("a")
    book.end(["a"])
    book.ended("a")
    assert book.grant("b").generation == 0


def test_a_generation_wraps_without_touching_the_incarnation():
    words = LeaseWords(0xFFFF_FFFF, 1)
    words.array[0] = 0xFFFF_FFFF_FFFF_FFFF
    words.end([0])
    assert int(words.array[0]) == 0xFFFF_FFFF_0000_0000


def test_the_word_of_another_run_of_the_worker_is_another_word():
    lease = LeaseWord(slot=0, generation=3, incarnation=1)
    assert lease.word(1) != lease.word(2)


def test_the_address_of_the_words_is_that_of_slot_0():
    words = LeaseWords(1, 8)
    assert words.address == words.array.ctypes.data
    assert words.array.itemsize == 8


@pytest.mark.parametrize(("drawn", "made"), [(lambda _: 0, 1), (lambda below: below - 1, (1 << 32) - 1)])
def test_incarnations_fit_half_a_word_and_are_never_0(monkeypatch, drawn, made):
    monkeypatch.setattr("kvferry.transport.lease.secrets.randbelow", drawn)
    assert new_incarnation() == made


def test_a_lease_for_longer_is_not_shortened_by_a_heartbeat(book, clock):
    book.grant("a", 300.0)
    book.extend(["a"])
    clock.now += 280
    assert book.end_expired() == {}
    book.extend(["a"])
    clock.now += 29
    assert book.end_expired() == {}, "nor ended while it is heard of"
    clock.now += 1
    assert book.end_expired().keys() == {"a"}


def test_once_void_no_lease_holds_not_even_one_that_is_granted_later(book):
    words, first = LeaseWords(9, 2), book.grant("a")
    assert int(words.array[first.slot]) == first.word(9)
    words.invalidate_all()
    words.end([first.slot])
    book.end(["a"])
    book.ended("a")
    for lease in (first, book.grant("b"), book.grant("c")):
        assert int(words.array[lease.slot]) != lease.word(9)


@pytest.mark.parametrize("seed", range(20))
def test_leases_end_as_in_a_book_that_looks_at_all_of_them(seed):
    draw, clock = random.Random(seed), Clock(100.0)
    book = LeaseBook(incarnation=7, slots=8, seconds=30.0, clock=clock)
    expires, granted = dict[str, float](), dict[str, float]()
    for _ in range(400):
        name = f"{draw.randrange(8)}"
        what = draw.choice(["grant", "extend", "restart", "end", "wait"])
        if what == "grant" and name not in expires:
            seconds = draw.choice([None, 5.0, float("inf")])
            book.grant(name, seconds)
            expires[name], granted[name] = clock.now + (30.0 if seconds is None else seconds), clock.now
        elif what == "extend":
            book.extend([name])
            if name in expires:
                expires[name] = max(expires[name], clock.now + 30.0)
                granted.pop(name, None)
        elif what == "restart" and name in expires:
            book.restart(name)
            expires[name] = clock.now + 30.0
            if name in granted:
                granted[name] = clock.now
        elif what == "end":
            assert book.end([name]).keys() == {name} & expires.keys()
            book.ended(name)
            expires.pop(name, None)
            granted.pop(name, None)
        clock.now += draw.choice([0.0, 1.0, 7.0])
        late = {one for one, at in expires.items() if at <= clock.now}
        assert book.end_expired().keys() == late
        for one in late:
            book.ended(one)
            del expires[one]
            granted.pop(one, None)
        old = [one for one, at in granted.items() if at <= clock.now - 10.0]
        assert sorted(book.unclaimed(10.0)) == sorted(old)
        assert set(book.held) == expires.keys()


def test_a_restarted_lease_is_no_longer_the_oldest_unclaimed_one(book, clock):
    book.grant("a", float("inf"))
    clock.now += 5
    book.grant("b")
    clock.now += 5
    book.restart("a")
    assert book.unclaimed(5) == ["b"]
    clock.now += 5
    assert book.unclaimed(5) == ["b", "a"]


def test_leases_that_have_ended_take_no_memory_until_they_would_have_expired(book):
    for _ in range(10_000):
        book.grant("a")
        book.end(["a"])
        book.ended("a")
    assert len(book._due) < 200
