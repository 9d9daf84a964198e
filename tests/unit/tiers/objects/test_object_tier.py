"""Chunks in object storage, on a real S3 server and in a folder."""

from __future__ import annotations

import re
import threading
from collections import Counter

import numpy as np
import pytest

from kvferry.common.errors import ChunkError
from kvferry.tiers.format.chunk import Chunk, ChunkGroup, ChunkSection
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.paths import chunk_name
from support.chunk_files import image, key, verify_bytes
from support.clock import Clock
from support.objects import get, known, open_objects, put, warnings
from support.stores import FILE_BYTES, GROUP, NAMESPACE, OTHER


@pytest.fixture
def store(place):
    return open_objects(*place)


@pytest.fixture
def other(place):
    """The store of another engine."""
    return open_objects(*place)


def name(number: int) -> str:
    return chunk_name(NAMESPACE.digest, key(number))


def objects(bucket: BucketClient) -> dict[str, int]:
    """Names and sizes of what is there."""
    return {one.path: one.size for page in bucket.list() for one in page}


def content(bucket: BucketClient, path: str) -> bytes:
    return b"".join(bucket.get(path).pieces)


def spoiled(number: int, at: int) -> bytes:
    data = bytearray(image(Chunk(NAMESPACE.digest, key(number), (GROUP,))))
    data[at] ^= 1
    return bytes(data)


# A place to keep chunks


def test_a_chunk_comes_back_as_it_was(store):
    assert put(store, 1) is PutOutcome.STORED
    assert get(store, 1) is GetOutcome.HIT
    assert get(store, 2) is GetOutcome.ABSENT
    assert known(store, 1, 2) == [True, False]
    assert store.stats.stored_bytes == FILE_BYTES
    assert not store.faults


def test_an_object_is_the_file_of_its_chunk_with_its_note_beside_it(store, bucket):
    put(store, 1)
    note = f"{NAMESPACE.digest.hex()}/namespace.json"
    assert objects(bucket) == {name(1): FILE_BYTES, note: len(NAMESPACE.note)}
    assert content(bucket, name(1)) == image(Chunk(NAMESPACE.digest, key(1), (GROUP,)))
    assert content(bucket, note).decode() == NAMESPACE.note


def test_padding_of_a_chunk_is_zero_whatever_was_in_memory(store, bucket):
    group = ChunkGroup("state", 0, (ChunkSection("head.3", 3, 36), ChunkSection("channel.4", 4, 1000)))
    chunk = Chunk(NAMESPACE.digest, key(1), (group,))
    memory = bytearray(b"\xee" * (chunk.file_bytes - chunk.offsets[0]))
    assert store.put(key(1), group, memoryview(memory)) is PutOutcome.STORED
    assert verify_bytes(content(bucket, name(1))).chunk == chunk
    assert set(memory[108:4096]) == {0}


def test_another_engine_finds_a_chunk_after_its_next_refresh(store, other):
    put(store, 1)
    assert known(other, 1) == [False]
    assert other.refresh() == 1
    assert known(other, 1) == [True]
    assert get(other, 1) is GetOutcome.HIT
    assert other.refresh() == 0


def test_a_store_that_is_opened_knows_what_is_there(place, store):
    for number in range(5):
        put(store, number)
    later = open_objects(*place)
    assert known(later, *range(6)) == [True] * 5 + [False]
    assert len(later) == 5


def test_a_listing_is_good_for_a_while(place, store):
    clock = Clock(100.0)
    later = open_objects(*place, listing_seconds=60.0, clock=clock)
    put(store, 1)
    clock.now = 159.0
    assert later.refresh() == 0
    assert known(later, 1) == [False]
    clock.now = 160.0
    assert later.refresh() == 1
    assert known(later, 1) == [True]


def test_a_listing_that_takes_too_long_is_left_with_what_it_showed(place, store):
    put(store, 1)
    clock = Clock()

    def late():
        clock.now += 10.0
        return clock.now

    later = open_objects(*place, clock=late, listing_seconds=1e6)
    assert known(later, 1) == [True]
    put(store, 2)
    assert later.refresh() == 1
    assert known(later, 1, 2) == [True, True]
    assert later.refresh() == 0


def test_getting_what_is_gone_forgets_it(store, bucket):
    put(store, 1)
    bucket.remove([name(1)])
    assert known(store, 1) == [True]
    assert get(store, 1) is GetOutcome.ABSENT
    assert known(store, 1) == [False]
    assert put(store, 1) is PutOutcome.STORED


def test_a_refresh_forgets_what_is_gone(store, other, bucket):
    put(store, 1)
    put(store, 2)
    bucket.remove([name(1)])
    assert store.refresh() == 1
    assert known(store, 1, 2) == [False, True]


def test_existing_object_is_not_sent_again(store, other, bucket):
    put(store, 1)
    [before] = [one for page in bucket.list() for one in page if one.path == name(1)]
    assert put(store, 1) is PutOutcome.PRESENT
    assert known(other, 1) == [False]
    assert put(other, 1) is PutOutcome.PRESENT
    assert known(other, 1) == [True]
    assert before in [one for page in bucket.list() for one in page]


def test_known_object_is_not_looked_up(store, other, bucket):
    put(store, 1)
    bucket.remove([name(1)])
    assert put(store, 1) is PutOutcome.PRESENT
    assert get(store, 1) is GetOutcome.ABSENT
    assert put(other, 1) is PutOutcome.STORED


def test_an_object_of_another_length_is_replaced(store, bucket):
    bucket.put(name(1), [b"half"])
    assert put(store, 1) is PutOutcome.STORED
    assert get(store, 1) is GetOutcome.HIT


def test_the_note_of_another_engine_stays(place, store, bucket):
    note = f"{NAMESPACE.digest.hex()}/namespace.json"
    bucket.put(note, [b"of another"])
    open_objects(*place).refresh()
    assert content(bucket, note) == b"of another"


def test_namespaces_do_not_see_each_other(place, store):
    other = open_objects(*place, namespace=OTHER)
    put(store, 1)
    other.refresh()
    assert known(other, 1) == [False]
    assert get(other, 1) is GetOutcome.ABSENT


def test_names_that_are_no_chunks_are_not_known(store, bucket):
    space = NAMESPACE.digest.hex()
    for path in (f"{space}/ff/{key(1).hex()}.kv", f"{space}/{key(1).hex()}.kv", f"{space}/6b/mine.kv"):
        bucket.put(path, [b"mine"])
    assert store.refresh() == 0
    assert len(store) == 0


def test_a_page_aligned_slot_of_a_large_chunk(store):
    group = ChunkGroup("full", 256, (ChunkSection("kv", 8, 5 << 18),))
    assert put(store, 1, group) is PutOutcome.STORED
    assert get(store, 1, group) is GetOutcome.HIT
    assert get(store, 1, group) is GetOutcome.HIT


def test_many_threads_at_once(store, other):
    def work(of, mine):
        done.extend(put(of, number) for number in mine)
        all_there.wait()
        done.extend(get(of, number) for number in range(24))
        of.refresh()

    done: list[PutOutcome | GetOutcome] = []
    all_there = threading.Barrier(8)
    work_of = [(store, range(3 * at, 3 * at + 3)) for at in range(4)]
    work_of += [(other, range(3 * at, 3 * at + 3)) for at in range(4, 8)]
    threads = [threading.Thread(target=work, args=each) for each in work_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(done) == {PutOutcome.STORED: 24, GetOutcome.HIT: 8 * 24}
    store.refresh()
    assert known(store, *range(25)) == [True] * 24 + [False]


def test_lookup_of_many_keys_does_not_ask_the_storage(store, bucket):
    for number in range(3):
        put(store, number)
    bucket.remove([name(number) for number in range(3)])
    found = store.contains([key(number) for number in range(1500)])
    assert found.dtype == np.bool_
    assert found.nonzero()[0].tolist() == [0, 1, 2]


def test_a_body_of_another_length_is_the_callers_mistake(store):
    with pytest.raises(ChunkError, match="a body of 8 bytes"):
        store.put(key(1), GROUP, memoryview(bytearray(8)))
    with pytest.raises(ChunkError, match="a body of 8 bytes"):
        store.get(key(1), GROUP, memoryview(bytearray(8)))
    assert not store.stats.puts
    assert not store.stats.gets
    put(store, 1)
    with pytest.raises(ChunkError, match="a body of 8 bytes"):
        store.put(key(1), GROUP, memoryview(bytearray(8)))


# Bad objects


@pytest.mark.parametrize("at", [0, 20, 200, 4096, 5000, FILE_BYTES - 1])
def test_a_damaged_object_is_a_miss_set_aside_and_healed_by_the_next_store(store, other, bucket, at, caplog):
    put(store, 1)
    bucket.put(name(1), [spoiled(1, at)])
    other.refresh()
    assert known(other, 1) == [True]
    assert get(other, 1) is GetOutcome.CORRUPT
    assert known(other, 1) == [False]
    assert other.stats.quarantined == 1
    [bad] = [path for path in objects(bucket) if path.startswith("quarantine/")]
    assert content(bucket, bad) == spoiled(1, at)
    assert name(1) not in objects(bucket)
    [said] = warnings(caplog)
    assert re.search(rf"object tier .*: chunk {key(1).hex()} is not used: corrupt \(.*\); see who", said)
    assert get(store, 1) is GetOutcome.ABSENT
    assert put(other, 1) is PutOutcome.STORED
    assert get(store, 1) is GetOutcome.HIT


@pytest.mark.parametrize("length", [0, 100, 4096, 5000, FILE_BYTES - 4096, FILE_BYTES + 4096])
def test_an_object_of_another_length_is_a_miss(store, bucket, length):
    whole = image(Chunk(NAMESPACE.digest, key(1), (GROUP,))) + bytes(4096)
    bucket.put(name(1), [whole[:length]])
    store.refresh()
    assert get(store, 1) is GetOutcome.CORRUPT
    assert store.stats.quarantined == 1


def test_the_chunk_of_another_key_is_a_miss(store, bucket):
    bucket.put(name(1), [image(Chunk(NAMESPACE.digest, key(2), (GROUP,)))])
    assert get(store, 1) is GetOutcome.CORRUPT


@pytest.mark.parametrize("sections", [(ChunkSection("k", 4, 7 << 10),), (ChunkSection("x", 8, 7 << 10),)])
def test_a_good_chunk_of_another_shape_is_a_miss_and_stays(store, bucket, sections, caplog):
    other = Chunk(NAMESPACE.digest, key(1), (ChunkGroup("full", 64, sections),))
    bucket.put(name(1), [image(other)])
    store.refresh()
    assert get(store, 1) is GetOutcome.OTHER_SHAPE
    assert content(bucket, name(1)) == image(other)
    assert "64 tokens of full, k 4 x 7168, v 4 x 7168 was wanted); the namespace" in warnings(caplog)[0]
    store.refresh()
    assert known(store, 1) == [False]
    assert put(store, 1) is PutOutcome.STORED
    assert get(store, 1) is GetOutcome.HIT


def test_a_bad_object_that_cannot_be_moved_is_not_fetched_again_until_it_has_changed(
    store, bucket, monkeypatch
):
    put(store, 1)
    bucket.put(name(1), [spoiled(1, 5000)])

    def denied(*_):
        raise PermissionError

    monkeypatch.setattr("obstore.rename", denied)
    assert get(store, 1) is GetOutcome.CORRUPT
    assert store.stats.quarantined == 0
    store.refresh()
    assert known(store, 1) == [False]
    bucket.put(name(1), [image(Chunk(NAMESPACE.digest, key(1), (GROUP,)))])
    store.refresh()
    assert known(store, 1) == [True]
    assert get(store, 1) is GetOutcome.HIT
