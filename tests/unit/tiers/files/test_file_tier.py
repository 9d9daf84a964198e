"""A directory of chunks: what was stored is fetched, nothing unverified is, and space is kept."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvferry.common.errors import ChunkError, ConfigError
from kvferry.keys import Namespace
from kvferry.tiers.files.chunk_file import read_chunk, whole_pages, write_chunk
from kvferry.tiers.files.ledger import Ledger, read_ledger
from kvferry.tiers.format.chunk import ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.paths import temporary_path
from support.chunk_files import key
from support.stores import (
    FILE_BYTES,
    GROUP,
    NAMESPACE,
    OTHER,
    body,
    fetch,
    file_of,
    keep,
    namespace_of,
    open_store,
    temporaries,
    total,
)

# Sections of 200 and 4095 bytes.
PADDED = ChunkGroup("mamba", 0, (ChunkSection("ssm", 2, 100), ChunkSection("conv", 5, 819)))


def test_stored_chunk_is_fetched(store):
    assert keep(store, 1) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert fetch(store, 2) == (GetOutcome.ABSENT, False)
    assert store.stats.puts == {PutOutcome.STORED: 1}
    assert store.stats.gets == {GetOutcome.HIT: 1, GetOutcome.ABSENT: 1}
    assert store.stats.stored_bytes == FILE_BYTES


def test_padding_of_a_section_is_zero_in_memory_and_in_the_file(store, tmp_path):
    stored, into = body(1, PADDED), body(2, PADDED)
    assert store.put(key(1), PADDED, stored) is PutOutcome.STORED
    for memory in (stored, file_of(tmp_path, 1).read_bytes()[4096:]):
        assert (memory[200:4096], memory[8191:]) == (bytes(3896), b"\0")
    assert store.get(key(1), PADDED, into) is GetOutcome.HIT
    assert into == stored


def test_a_chunk_that_is_there_is_not_written_again(store, tmp_path):
    keep(store, 1)
    inode = file_of(tmp_path, 1).stat().st_ino
    assert keep(store, 1) is PutOutcome.PRESENT
    assert file_of(tmp_path, 1).stat().st_ino == inode


def test_threads_share_a_store(store, tmp_path):
    def both(number):
        # Some are evicted, some are stored again while they are there.
        return keep(store, number % (40 if number % 2 else 4)), fetch(store, (number * 7) % 40)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(both, range(400)))
    assert {put for put, _ in done} == {PutOutcome.STORED, PutOutcome.PRESENT}
    assert {got for _, got in done} == {(GetOutcome.HIT, True), (GetOutcome.ABSENT, False)}
    assert read_ledger(tmp_path) == (1 << 20, total(tmp_path))
    assert sum(store.stats.puts.values()) == sum(store.stats.gets.values()) == 400


def test_no_room_is_made_for_a_chunk_that_is_there(store):
    for number in range(30):
        keep(store, number)
    evicted = store.stats.evicted
    assert keep(store, 29) is PutOutcome.PRESENT
    assert store.stats.evicted == evicted > 0


def test_a_chunk_that_two_write_at_once_is_there_once_and_counted_once(store, tmp_path):
    def write_while_the_other_does(fd, *args):
        assert keep(store, 1) is PutOutcome.STORED
        write_chunk(fd, *args)

    assert keep(open_store(tmp_path, write=write_while_the_other_does), 1) is PutOutcome.PRESENT
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert read_ledger(tmp_path) == (1 << 20, total(tmp_path))


def test_another_shape_is_a_miss_and_the_file_stays(store):
    keep(store, 1)
    for other in (
        ChunkGroup("full", 32, GROUP.sections),
        ChunkGroup("sliding", 64, GROUP.sections),
        ChunkGroup("full", 64, (ChunkSection("k", 8, 7 << 9), ChunkSection("v", 4, 7 << 10))),
        ChunkGroup("full", 64, GROUP.sections[:1]),
        ChunkGroup("full", 64, (*GROUP.sections, ChunkSection("w", 500, 1))),
    ):
        assert fetch(store, 1, other)[0] is GetOutcome.OTHER_SHAPE
    assert fetch(store, 1) == (GetOutcome.HIT, True)


def test_a_changed_byte_is_a_miss_and_the_file_goes_to_quarantine(store, tmp_path, caplog):
    keep(store, 1)
    path = file_of(tmp_path, 1)
    spoil(path, 4096 + 2 * (7 << 10))
    assert fetch(store, 1)[0] is GetOutcome.CORRUPT
    assert not path.exists()
    assert [bad.stat().st_size for bad in (tmp_path / "quarantine").iterdir()] == [FILE_BYTES]
    assert store.stats.quarantined == 1
    assert store.stats.misses == {GetOutcome.CORRUPT: 1}
    assert not store.contains([key(1)])
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    assert caplog.text.count("unit 2 of section k is damaged") == 1
    assert read_ledger(tmp_path) == (1 << 20, total(tmp_path))
    assert keep(store, 1) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)


@pytest.mark.parametrize("at", [0, 8, 12, 17, 33, 70, 130, 300, 500, 1000, 4000])
def test_a_changed_byte_in_the_header_is_a_miss(store, tmp_path, at):
    keep(store, 1)
    spoil(file_of(tmp_path, 1), at)
    assert fetch(store, 1)[0] is GetOutcome.CORRUPT
    assert store.stats.quarantined == 1


@pytest.mark.parametrize("size", [0, 1, 127, 128, 4095, 4096, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_a_miss(store, tmp_path, size):
    keep(store, 1)
    os.truncate(file_of(tmp_path, 1), size)
    assert fetch(store, 1)[0] is GetOutcome.CORRUPT


def test_a_good_file_under_the_name_of_another_is_a_miss(store, tmp_path):
    keep(store, 1)
    keep(store, 2)
    shutil.copy(file_of(tmp_path, 1), file_of(tmp_path, 2))
    assert fetch(store, 2)[0] is GetOutcome.CORRUPT
    other = open_store(tmp_path, namespace=OTHER)
    path = tmp_path / OTHER.digest.hex() / file_of(tmp_path, 1).parent.name
    path.mkdir()
    shutil.copy(file_of(tmp_path, 1), path)
    assert fetch(other, 1)[0] is GetOutcome.CORRUPT
    assert fetch(store, 1) == (GetOutcome.HIT, True)


def test_a_file_cut_off_while_it_is_read_is_a_miss(store, tmp_path):
    keep(store, 1)

    def cut_off_before(fd, *args):
        os.truncate(file_of(tmp_path, 1), 5000)
        return read_chunk(fd, *args)

    assert fetch(open_store(tmp_path, read=cut_off_before), 1)[0] is GetOutcome.CORRUPT


def test_a_file_that_reads_differently_each_time_is_a_miss_and_stays(store, tmp_path, caplog):
    keep(store, 1)
    misread = open_store(tmp_path, read=lambda *args: read_chunk(*args) and False)
    assert fetch(misread, 1)[0] is GetOutcome.IO_ERROR
    assert "the header changed between two reads" in caplog.text
    assert fetch(store, 1) == (GetOutcome.HIT, True)


def test_a_bad_file_that_a_good_one_has_replaced_leaves_the_good_one_alone(store, tmp_path):
    keep(store, 1)
    spoil(file_of(tmp_path, 1), 5000)

    def replaced_meanwhile(*args):
        good = read_chunk(*args)
        file_of(tmp_path, 1).unlink()
        keep(open_store(tmp_path), 1)
        return good

    reader = open_store(tmp_path, read=replaced_meanwhile)
    assert fetch(reader, 1)[0] is GetOutcome.CORRUPT
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert reader.stats.quarantined == 0


def test_the_file_used_longest_ago_goes_first(tmp_path, clock):
    store = open_store(tmp_path, capacity=4 * FILE_BYTES, clock=clock)
    for number in range(3):
        clock.now += 60
        keep(store, number)
    clock.now += 60
    store.mark_used([key(0)])
    clock.now += 60
    keep(store, 3)
    assert list(store.contains([key(number) for number in range(4)])) == [True, False, True, True]
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    assert (store.stats.evicted, store.stats.evicted_bytes) == (1, FILE_BYTES)


def test_eviction_of_a_file_in_a_wrong_folder_forgets_no_other_chunk(tmp_path, clock):
    store = open_store(tmp_path, capacity=8 * FILE_BYTES, clock=clock)
    keep(store, 0)
    there = file_of(tmp_path, 0)
    wrong = there.parent.with_name("00" if there.parent.name != "00" else "01") / there.name
    wrong.parent.mkdir(exist_ok=True)
    shutil.copyfile(there, wrong)
    os.utime(wrong, (0, 0))
    number = 0
    while wrong.exists():
        number += 1
        clock.now += 60
        store.mark_used([key(0)])
        keep(store, number)
    assert there.exists()
    assert store.contains([key(0)])


def test_a_cold_file_goes_before_all_others_until_it_is_used(tmp_path, clock):
    store = open_store(tmp_path, capacity=5 * FILE_BYTES, clock=clock)
    for number, cold in enumerate((False, True, True, True)):
        clock.now += 60
        assert store.put(key(number), GROUP, body(number), cold) is PutOutcome.STORED
    store.mark_used([key(1)])
    for number, gone in ((4, 2), (5, 3), (6, 0)):
        clock.now += 60
        keep(store, number)
        assert not store.contains([key(gone)])[0]
    assert store.contains([key(1)])[0]


def test_a_cold_file_goes_first_also_if_older_ones_are_listed_for_eviction(tmp_path, clock):
    store = open_store(tmp_path, capacity=5 * FILE_BYTES, clock=clock)
    for number in range(5):  # there is room for four beside the notes; the walk for the fifth lists them
        clock.now += 60
        keep(store, number)
    assert not store.contains([key(0)])[0]
    for number, gone in ((5, 1), (6, 5), (7, 6), (8, 2)):
        clock.now += 60
        store.put(key(number), GROUP, body(number), number in (5, 6))
        assert not store.contains([key(gone)])[0]


def test_cold_files_are_evicted_in_the_order_in_which_they_were_stored(tmp_path, clock):
    def put_cold(store, number):
        clock.now += 60
        store.put(key(number), GROUP, body(number), cold=True)
        assert sum(map(len, store._space._oldest.values())) <= 2

    # Room for five, of which two are listed.
    first = open_store(tmp_path, capacity=6 * FILE_BYTES, clock=clock, max_listed=2)
    for number in range(5):
        put_cold(first, number)
    store = open_store(tmp_path, clock=clock, max_listed=2)
    for number in range(5, 12):
        put_cold(store, number)
        assert store.contains([key(n) for n in range(number + 1)]).nonzero()[0].tolist() == [
            *range(number - 4, number + 1)
        ]


def used_ns(root, *numbers):
    return [file_of(root, number).stat().st_mtime_ns for number in numbers]


def test_later_use_has_a_later_time_however_soon(store, tmp_path, clock):
    for number in (0, 1, 2):
        keep(store, number)
        clock.now += 3
    before = used_ns(tmp_path, 2)
    store.mark_used([key(number) for number in (2, 9, 1, 0)])
    first, second, third = used_ns(tmp_path, 0, 1, 2)
    assert first > second > third
    assert [third] == before, "that was noted when it was stored"


def test_a_use_that_was_noted_lately_is_not_noted_again(store, tmp_path, clock):
    keep(store, 0)
    clock.now += 9
    before = used_ns(tmp_path, 0)
    store.mark_used([key(0)])
    assert used_ns(tmp_path, 0) == before
    clock.now += 1
    store.mark_used([key(0)])
    assert used_ns(tmp_path, 0) == [int(clock.now * 1e9)]


def test_a_time_far_ahead_is_put_right_and_does_not_spread(store, tmp_path, clock):
    """Of a machine whose clock is wrong: what is used after it would never be evicted either."""
    for number in (0, 1):
        keep(store, number)
    year = int((clock.now + 365 * 86_400) * 1e9)
    os.utime(file_of(tmp_path, 1), ns=(year, year))
    clock.now += 60
    store.mark_used([key(1), key(0)])
    end, beginning = used_ns(tmp_path, 1, 0)
    assert end == int(clock.now * 1e9) < beginning < end + 10**6


def test_a_file_that_goes_while_its_use_is_noted_keeps_no_other_from_it(store, tmp_path, clock):
    for number in (0, 1):
        keep(store, number)
    clock.now += 60
    file_of(tmp_path, 0).unlink()
    store.mark_used([key(0), key(1)])
    assert used_ns(tmp_path, 1) == [int(clock.now * 1e9)]


def test_chunk_used_after_it_was_listed_for_eviction_is_spared(tmp_path, clock):
    store = open_store(tmp_path, capacity=4 * FILE_BYTES, clock=clock)
    for number in range(4):
        clock.now += 60
        keep(store, number)
    clock.now += 60
    other = open_store(tmp_path, clock=clock)
    other.mark_used([key(1)])
    for number in (4, 5):
        clock.now += 60
        keep(store, number)
    assert fetch(store, 1)[0] is GetOutcome.HIT
    assert fetch(store, 2)[0] is GetOutcome.ABSENT


def test_the_capacity_is_kept_across_namespaces_and_quarantine_counts(tmp_path, clock):
    capacity = 5 * FILE_BYTES
    store = open_store(tmp_path, capacity=capacity, clock=clock)
    other = open_store(tmp_path, namespace=OTHER, clock=clock)
    for number in range(40):
        clock.now += 60
        assert keep((store if number % 5 else other), number) is PutOutcome.STORED
        if number % 5 == 1:
            spoil(file_of(tmp_path, number), 5000)
            assert fetch(store, number)[0] is GetOutcome.CORRUPT
        assert total(tmp_path) <= capacity
        assert number < 4 or total(tmp_path) > capacity - 2 * FILE_BYTES
        assert read_ledger(tmp_path) == (capacity, total(tmp_path))


def test_room_is_made_before_the_write_and_not_after(tmp_path):
    def seen(fd, *args):
        write_chunk(fd, *args)
        assert total(tmp_path) <= 1 << 20

    store = open_store(tmp_path, capacity=1 << 20, write=seen)
    for number in range(40):
        keep(store, number)
    assert store.stats.evicted > 20
    assert not store.stats.dropped


def test_a_chunk_larger_than_the_capacity_is_dropped_and_nothing_goes_for_it(store, caplog):
    keep(store, 1)
    large = ChunkGroup("full", 64, (ChunkSection("k", 4, 1 << 18),))
    for _ in range(2):
        assert keep(store, 2, large) is PutOutcome.TOO_LARGE
    assert fetch(store, 1)[0] is GetOutcome.HIT
    assert store.stats.dropped == {PutOutcome.TOO_LARGE: 2}
    assert caplog.text.count("larger than the capacity") == 1
    assert "raise the capacity" in caplog.text


def test_wrong_body_or_key_is_refused_without_effect(store, tmp_path):
    before = total(tmp_path)
    for call in (store.put, store.get):
        with pytest.raises(ChunkError, match="a body of 4096 bytes; expected 57344"):
            call(key(1), GROUP, whole_pages(4096))
        with pytest.raises(ChunkError, match="a key of 3 bytes"):
            call(b"key", GROUP, body(1))
    assert (total(tmp_path), store.stats.puts, store.stats.gets) == (before, {}, {})


def test_stores_and_evictions_of_another_process_are_noticed(store, tmp_path):
    other = open_store(tmp_path)
    keep(other, 1)
    assert list(store.contains([key(1), key(2)])) == [False, False]
    assert fetch(store, 1) == (GetOutcome.HIT, True)
    assert store.refresh() == 1
    assert list(store.contains([key(1), key(2)])) == [True, False]
    file_of(tmp_path, 1).unlink()
    assert store.contains([key(1)])
    assert fetch(store, 1)[0] is GetOutcome.ABSENT
    assert not store.contains([key(1)])


def test_a_new_process_finds_what_was_stored(store, tmp_path):
    for number in range(5):
        keep(store, number)
    again = open_store(tmp_path)
    assert len(again) == 5
    assert all(fetch(again, number) == (GetOutcome.HIT, True) for number in range(5))
    assert read_ledger(tmp_path)[0] == 1 << 20


def test_the_namespace_can_be_read_by_people(store, tmp_path):
    note = (tmp_path / NAMESPACE.digest.hex() / "namespace.json").read_text()
    assert json.loads(note) == {"name": "tests/small", "facts": NAMESPACE.facts}
    assert Namespace.read(note) == NAMESPACE


def test_a_model_of_another_name_shares_chunks_and_leaves_the_note_alone(store, tmp_path):
    keep(store, 1)
    other = open_store(tmp_path, namespace=namespace_of("0123abcd", "tests/renamed"))
    assert fetch(other, 1) == (GetOutcome.HIT, True)
    assert "tests/small" in (tmp_path / NAMESPACE.digest.hex() / "namespace.json").read_text()


def test_a_durable_chunk_is_flushed_and_then_its_folder(tmp_path, monkeypatch):
    done = []
    for name in ("fdatasync", "rename", "fsync"):
        monkeypatch.setattr(os, name, noted(done, getattr(os, name)))
    store = open_store(tmp_path, capacity=1 << 20, durable=True)
    done.clear()
    keep(store, 1)
    assert [name for name, _ in done] == ["fsync", "fdatasync", "rename", "fsync"]
    assert done[-1][1] == str(file_of(tmp_path, 1).parent)
    done.clear()
    keep(open_store(tmp_path), 2)
    assert [name for name, _ in done] == ["rename"]


def test_leftovers_of_a_dead_writer_are_swept_at_start_and_their_bytes_released(store, tmp_path):
    killed = get_context("spawn").Process(target=die_while_writing, args=(tmp_path,))
    killed.start()
    killed.join()
    assert killed.exitcode == -9
    (left,) = temporaries(tmp_path)
    assert left.stat().st_size == 10_000
    assert read_ledger(tmp_path)[1] == total(tmp_path) - 10_000 + FILE_BYTES
    again = open_store(tmp_path)
    assert again.stats.swept == 1
    assert not temporaries(tmp_path)
    assert read_ledger(tmp_path)[1] == total(tmp_path)


def test_a_file_that_is_being_written_is_not_swept(tmp_path):
    def opened_meanwhile(fd, *args):
        assert open_store(tmp_path).stats.swept == 0
        assert read_ledger(tmp_path)[1] == total(tmp_path) + FILE_BYTES
        write_chunk(fd, *args)

    store = open_store(tmp_path, capacity=1 << 20, write=opened_meanwhile)
    assert keep(store, 1) is PutOutcome.STORED
    assert fetch(store, 1) == (GetOutcome.HIT, True)


def test_a_leftover_of_another_machine_is_swept_when_it_is_old(store, tmp_path, clock):
    folder = tmp_path / NAMESPACE.digest.hex() / "ab"
    folder.mkdir()
    name = Path(temporary_path(str(file_of(tmp_path, 1)), 1000)).name.split(".")
    name[3] = "0" * 32
    left = folder / ".".join(name)
    left.write_bytes(bytes(100))
    os.utime(left, (clock.now, clock.now))
    clock.now += 899
    open_store(tmp_path, clock=clock)
    assert left.exists()
    clock.now += 2
    open_store(tmp_path, clock=clock)
    assert not left.exists()


def test_space_that_killed_writers_hold_is_found_before_a_store_is_dropped(tmp_path):
    store = open_store(tmp_path, capacity=2 * FILE_BYTES + 4096)
    killed = get_context("spawn").Process(target=die_while_writing, args=(tmp_path, 9))
    killed.start()
    killed.join()
    assert keep(store, 1) is PutOutcome.STORED
    assert keep(store, 2) is PutOutcome.STORED
    assert (store.stats.swept, store.stats.evicted) == (1, 0)


@pytest.mark.parametrize("damage", [b"", b"x", bytes(64), b"KVFLEDGR\1" + bytes(55)])
def test_a_damaged_ledger_is_counted_anew(store, tmp_path, damage):
    for number in range(5):
        keep(store, number)
    (tmp_path / "ledger").write_bytes(damage)
    assert keep(store, 5) is PutOutcome.STORED
    assert read_ledger(tmp_path) == (1 << 20, total(tmp_path))


def test_a_ledger_that_says_too_much_is_counted_anew_before_a_store_is_dropped(store, tmp_path):
    keep(store, 0)
    with Ledger(str(tmp_path)).held() as account:
        account.charge(1 << 30, "")
    assert keep(store, 1) is PutOutcome.STORED
    assert read_ledger(tmp_path)[1] == total(tmp_path)


def test_a_ledger_that_was_replaced_while_it_was_waited_for_is_held_anew(store, tmp_path, monkeypatch):
    lock = fcntl.flock

    def replaced_before(fd, operation):
        monkeypatch.undo()
        (tmp_path / "ledger").rename(tmp_path / "cleared")
        (tmp_path / "ledger").write_bytes((tmp_path / "cleared").read_bytes())
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_before)
    with (
        Ledger(str(tmp_path)).held(),
        (tmp_path / "ledger").open("rb") as file,
        pytest.raises(BlockingIOError),
    ):
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_ledger_held_by_a_process_that_hangs_drops_the_store_and_not_the_fetch(tmp_path, caplog):
    store = open_store(tmp_path, capacity=1 << 20, lock_seconds=0.05)
    keep(store, 1)
    with (tmp_path / "ledger").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert keep(store, 2) is PutOutcome.BUSY
        assert fetch(store, 1) == (GetOutcome.HIT, True)
    (waited,) = re.findall(r"was held by other processes for (\S+) s", caplog.text)
    assert float(waited) >= 0.05
    assert keep(store, 2) is PutOutcome.STORED


def test_a_ledger_lost_while_a_file_is_written_costs_no_space_for_ever(tmp_path):
    store = open_store(tmp_path, capacity=1 << 20)
    held = (tmp_path / "ledger").open("rb")

    def taken_meanwhile(fd, *args):
        write_chunk(fd, *args)
        fcntl.flock(held, fcntl.LOCK_EX)

    assert keep(open_store(tmp_path, lock_seconds=0.05, write=taken_meanwhile), 1) is PutOutcome.BUSY
    held.close()
    (left,) = temporaries(tmp_path)
    assert left.stat().st_size == 0
    for number in range(2, 30):
        assert keep(store, number) is PutOutcome.STORED
    assert store.stats.swept == 1
    assert read_ledger(tmp_path)[1] == total(tmp_path)


def test_no_file_comes_or_goes_unless_the_ledger_is_held(store, tmp_path, monkeypatch):
    seen = []

    def checked(name):
        real = getattr(os, name)

        def checking(path, *args, **kwargs):
            if name != "open" or args[0] & os.O_EXCL:
                with (tmp_path / "ledger").open("rb") as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(name)
            return real(path, *args, **kwargs)

        return checking

    for name in ("unlink", "rename", "open"):
        monkeypatch.setattr(os, name, checked(name))
    for number in range(20):
        keep(store, number)
    spoil(file_of(tmp_path, 19), 5000)
    assert fetch(store, 19)[0] is GetOutcome.CORRUPT
    assert set(seen) == {"unlink", "rename", "open"}
    store = open_store(tmp_path, write=broken)
    seen.clear()
    assert keep(store, 50) is PutOutcome.IO_ERROR
    assert seen == ["unlink", "open", "unlink"]


def test_a_full_device_drops_the_store_in_words_and_leaves_nothing(tmp_path, caplog):
    def full(fd, *args):
        os.write(fd, bytes(4096))
        out_of_space(fd, *args)

    store = open_store(tmp_path, capacity=1 << 20, write=full)
    for _ in range(2):
        assert keep(store, 1) is PutOutcome.NO_SPACE
    assert not temporaries(tmp_path)
    assert read_ledger(tmp_path)[1] == total(tmp_path)
    assert store.stats.dropped == {PutOutcome.NO_SPACE: 2}
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "no space on the device" in said
    assert "are free, but a quota" in said
    assert "lower the capacity" in said


def test_a_file_size_limit_of_the_kernel_drops_the_store(tmp_path):
    ended = get_context("spawn").Process(target=store_under_a_limit, args=(tmp_path,))
    ended.start()
    ended.join()
    assert ended.exitcode == 0


def test_a_small_disk_that_others_fill_keeps_the_chunks_used_last(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        store = open_store(tmp_path, capacity=3 << 20)
        keep(store, 0)
        free = os.statvfs(tmp_path).f_bavail * 4096
        (tmp_path / "foreign").write_bytes(bytes(free - 100_000))
        assert {keep(store, number) for number in range(1, 5)} == {PutOutcome.STORED}
        assert [fetch(store, number)[0] for number in range(5)] == [
            *[GetOutcome.ABSENT] * 3,
            GetOutcome.HIT,
            GetOutcome.HIT,
        ]
        assert not temporaries(tmp_path)
        (tmp_path / "foreign").unlink()
        assert keep(store, 5) is PutOutcome.STORED
        assert fetch(store, 3) == (GetOutcome.HIT, True)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_an_unmounted_disk_is_not_replaced_by_the_folder_under_it(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("may not mount a small disk")
    try:
        store = open_store(tmp_path, capacity=3 << 20)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    (tmp_path / NAMESPACE.digest.hex() / key(1)[:1].hex()).mkdir(parents=True)
    assert keep(store, 1) is PutOutcome.IO_ERROR
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent does not exist; make the directory, or mount the disk"):
        open_store(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no directory"):
        open_store(tmp_path / "file")


def test_a_capacity_above_the_disk_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"free and .* of cache under .* capacity asks for .*; lower the cap"
    ):
        open_store(tmp_path, capacity=1 << 60)


def test_a_capacity_that_holds_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot hold the \d+ B that are needed .*; raise the capacity"):
        open_store(tmp_path, capacity=100)


def test_the_default_capacity_is_a_tenth_of_the_free_space(tmp_path):
    space = os.statvfs(tmp_path)
    open_store(tmp_path)
    assert read_ledger(tmp_path)[0] == pytest.approx(space.f_bavail * space.f_frsize / 10, rel=0.05)


def test_the_last_capacity_given_holds_for_all_and_is_kept_at_once(store, tmp_path):
    for number in range(10):
        keep(store, number)
    open_store(tmp_path, capacity=4 * FILE_BYTES)
    assert total(tmp_path) <= 4 * FILE_BYTES
    for number in range(10, 20):
        keep(store, number)
        assert total(tmp_path) <= 4 * FILE_BYTES


def test_a_directory_of_another_version_is_refused(tmp_path):
    (tmp_path / "kvferry.json").write_text('{"kvferry": "file tier", "directory": 3}')
    with pytest.raises(ConfigError, match="directory version 3, this release knows versions 1 and 2; name"):
        open_store(tmp_path)


@pytest.mark.parametrize("note", ["", "[]", "7", '{"kvferry": 1}', '{"kvferry": "file tier"}', "\0", '"x"'])
def test_a_directory_with_a_strange_marker_is_refused(tmp_path, note):
    (tmp_path / "kvferry.json").write_text(note)
    with pytest.raises(ConfigError, match=r"kvferry.json was not written by kvferry; name another directory"):
        open_store(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refused(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(
        ConfigError, match=r"cannot use .*: Permission denied \(.*quarantine\); see to its owner"
    ):
        open_store(tmp_path)


def test_a_file_that_cannot_be_read_is_a_miss_and_stays(store, tmp_path):
    keep(store, 1)

    assert fetch(open_store(tmp_path, read=broken), 1)[0] is GetOutcome.IO_ERROR
    assert file_of(tmp_path, 1).exists()


def broken(*args):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def out_of_space(fd, *args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spoil(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def noted(done, call):
    def noting(*args, **kwargs):
        where = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if isinstance(args[0], int) else args[0]
        done.append((call.__name__, where))
        return call(*args, **kwargs)

    return noting


def die_while_writing(path, number=1):
    def die(fd, *args):
        os.write(fd, bytes(10_000))
        os.kill(os.getpid(), 9)

    keep(open_store(path, write=die), number)


def store_under_a_limit(path):
    store = open_store(path, capacity=1 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    done = keep(store, 1)
    if done is not PutOutcome.NO_SPACE or temporaries(path) or read_ledger(path)[1] != total(path):
        sys.exit(1)
