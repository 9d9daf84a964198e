"""The tiered cache: stores, loads, slow tiers that answer late or never, in any order, over real memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict
from functools import partial
from hashlib import shake_128

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.cache.chunk_cache import WRITE_BACK_SHARE, ChunkCache, PromptChunk
from kvferry.cache.tier_queue import STUCK_SECONDS, TierQueue
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.names import GetOutcome, PutOutcome
from kvferry.tiers.storage_tier import LateFetch
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from support.clock import Clock
from support.examples import examples
from support.models import attention, model, state
from support.slow_tiers import answer, end_late, fake_tiers, jobs_of, queue_by_hand, table_of

PAGE, CHUNK = 4096, 64
KV = attention(k=8, v=8)
MODEL = model(KV, KV, LayerCache(GroupKind.SLIDING, 24, KV.fields), state())
GROUPS = canonical_form_of(lay_out(MODEL, EngineShape(1, (4,), 16, "LBHNC", 9)), CHUNK).groups
KEYS = [b"%031d" % n + bytes((n % len(GROUPS),)) for n in range(9)]
MISSES = [
    GetOutcome.ABSENT,
    GetOutcome.CORRUPT,
    GetOutcome.OTHER_SHAPE,
    GetOutcome.IO_ERROR,
    OSError,
    LateFetch,
]
MOSTLY = st.sampled_from([True, True, True, False])
DROPS = [PutOutcome.NO_SPACE, PutOutcome.BUSY, PutOutcome.IO_ERROR, OSError]


class Memory:
    """As much of an arena as this takes, with nothing of the system's behind it."""

    def __init__(self, size):
        self.memory = np.zeros(size, np.uint8)

    def bytes_at(self, offset, size):
        return memoryview(self.memory)[offset : offset + size]


ARENA = Memory(34 * PAGE)


def group_of(key):
    return key[-1]


def size_of(key):
    return GROUPS[group_of(key)].chunk_bytes


def content(key):
    """The bytes of a chunk: what its key names."""
    return shake_128(key).digest(size_of(key))


def tokens_of(key):
    return 0 if GROUPS[group_of(key)].kind is GroupKind.STATE else CHUNK


def want(key):
    return PromptChunk(group_of(key), KEYS.index(key), key, tokens_of(key))


class Cache:
    """A cache over memory of its own, with slow tiers behind it, the fastest first."""

    def __init__(self, arena, pages, tiers, policy="lru", write_back=(), writers=4):
        self.clock = Clock()
        self.arena, self.base = arena, arena.memory.ctypes.data
        sizes = [group.chunk_bytes for group in GROUPS]
        self.host = HostTier(pages * PAGE, sizes, partial(self.policy_of, policy), table_of(tiers))
        self.tiers = tiers
        self.queues = [
            queue_by_hand(tier, self.clock, writers=writers, write_back=tier.name in write_back)
            for tier in tiers
        ]
        self.cache = ChunkCache(self.host, arena.bytes_at, GROUPS, self.queues, self.clock)

    def policy_of(self, name, capacity):
        self.policy = EVICTION_POLICIES[name](capacity)
        return self.policy

    def at(self, slot):
        return self.arena.memory[slot.offset : slot.offset + size_of(slot.key)]

    def fill(self, slot):
        self.at(slot)[:] = np.frombuffer(content(slot.key), np.uint8)
        self.cache.filled(slot, tokens_of(slot.key), None)

    def store(self, *keys):
        for key in keys:
            slot = self.cache.reserve(key, group_of(key))
            assert slot is not None
            self.fill(slot)

    def leave(self, key):
        """A chunk leaves host memory, as if others had taken its room."""
        if self.host.contains([key])[0]:
            self.host.evict(key)

    def fetch(self, *keys, **options):
        return self.cache.fetch([want(key) for key in keys], **options)

    def answer(self, number, what, key, as_):
        """Let an operation of a tier end, and hear of it."""
        answer(self.queues[number], what, key, as_)
        self.cache.poll()

    def jobs(self, number):
        return [(what, key) for what, key, _ in jobs_of(self.queues[number])]


class Living(RuleBasedStateMachine):
    """What ranks, loads, threads, other processes and time may do."""

    @initialize(
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        pages=st.integers(16, 34),
        tiers=st.sampled_from([2, 2, 1, 0]),
        write_back=st.sampled_from([(), ("file",), ("object",), ("file", "object")]),
        there=st.lists(st.sets(st.sampled_from(KEYS), min_size=4), min_size=2, max_size=2),
    )
    def make(self, policy, pages, tiers, write_back, there):
        self.write_back = write_back
        kept = [[(key, content(key)) for key in sorted(keys)] for keys in there]
        fakes = fake_tiers(*kept[:tiers])
        self.made = Cache(ARENA, pages, fakes, policy, write_back)
        self.cache, self.host, self.queues = self.made.cache, self.made.host, self.made.queues
        self.fills = []
        self.loads = []  # [fetch, keys, those taken]
        self.taken = []  # slots
        self.owed = [set() for _ in fakes]
        self.lost = [0 for _ in fakes]
        self.hits = set()  # (number of the tier, key) of reads that have ended unheard
        self.counted = -1, None

    def sorted_slots(self, slots):
        return sorted(slots, key=lambda slot: slot.serial)

    # -- ranks ------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def reserve(self, key):
        slot = self.cache.reserve(key, group_of(key))
        self.note_lost()
        if slot is not None:
            self.fills.append(slot)
            self.made.at(slot)[:] = 1

    @rule(keys=st.lists(st.sampled_from(KEYS[:6]), max_size=4))
    def store(self, keys):
        for key in keys:
            slot = self.cache.reserve(key, group_of(key))
            self.note_lost()
            if slot is not None:
                self.filled(slot)

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), well=st.booleans())
    def fill(self, data, well):
        slot = data.draw(st.sampled_from(self.sorted_slots(self.fills)))
        self.fills.remove(slot)
        if well:
            self.filled(slot)
        else:
            self.cache.filled(slot, 0, "the block is gone")

    def filled(self, slot):
        before = self.cache.counts.stored
        self.made.fill(slot)
        if self.cache.counts.stored > before:
            for number in range(len(self.queues)):
                self.note_owed(number, slot.key)

    def note_owed(self, number, key):
        if not self.made.tiers[number].contains([key])[0] and key not in self.cache.slow_tiers[number].held:
            self.owed[number].add(key)

    def note_lost(self):
        """What is owed no longer, and was not written, has left host memory, and is counted."""
        for number, writing in enumerate(self.cache.slow_tiers):
            self.owed[number] -= writing.held.keys()
            gone = self.owed[number] - set(writing.queued)
            self.owed[number] -= gone
            self.lost[number] += len(gone)
            assert not self.host.contains(sorted(gone)).any()
            assert self.owed[number] == set(writing.queued)
            assert self.lost[number] == writing.lost

    # -- loads ------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
        offered=MOSTLY,
    )
    def fetch(self, data, keys, offered):
        """Often what slow tiers have, and what others wait for."""
        if offered:
            here = self.cache.available(KEYS) & ~self.host.contains(KEYS)
            keys = [KEYS[at] for at in np.flatnonzero(here)][data.draw(st.integers(0, 3)) :] or keys
        fetch = self.made.fetch(*keys)
        self.note_lost()
        self.loads.append([fetch, keys, []])

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def take(self, data):
        fetch, _, taken = self.loads[data.draw(st.integers(0, len(self.loads) - 1))]
        for of, slot in fetch.take():
            assert (slot.key, slot.group) == (of.key, of.group)
            taken.append(of.key)
            self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def close(self, data):
        slot = data.draw(st.sampled_from(self.sorted_slots(self.taken)))
        self.taken.remove(slot)
        self.cache.host.close(slot)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def cancel(self, data):
        fetch, _, _ = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.cache.cancel(fetch)
        assert fetch.over
        assert not fetch.take()

    # -- threads, others, time --------------------------------------------------------------------------

    @precondition(lambda self: any(map(jobs_of, self.queues)))
    @rule(data=st.data(), well=MOSTLY, many=st.booleans(), heard=MOSTLY)
    def operations_end(self, data, well, many, heard):
        open_ = [(n, what, key) for n in range(len(self.queues)) for what, key in sorted(self.made.jobs(n))]
        for number, what, key in open_[:5] if many else [data.draw(st.sampled_from(open_))]:
            ways = (
                ([GetOutcome.HIT], MISSES)
                if what == "read"
                else ([PutOutcome.STORED, PutOutcome.PRESENT], DROPS)
            )
            self.end(number, what, key, data.draw(st.sampled_from(ways[0] if well else ways[1])))
        if heard:
            self.poll()

    def end(self, number, what, key, as_):
        answer(self.queues[number], what, key, as_)
        if as_ is GetOutcome.HIT and key in self.made.tiers[number].kept:
            self.hits.add((number, key))
        if what == "write" and key in self.made.tiers[number].kept:
            assert self.made.tiers[number].kept[key] == content(key), "what is written is what was stored"

    @precondition(lambda self: any(tier.late for tier in self.made.tiers))
    @rule(data=st.data())
    def late_read_ends(self, data):
        end_late(data.draw(st.sampled_from([tier for tier in self.made.tiers if tier.late])))

    def end_all_late(self):
        for tier in self.made.tiers:
            while tier.late:
                end_late(tier)
        self.cache.poll()

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), key=st.sampled_from(KEYS), there=st.booleans(), heard=st.booleans())
    def others_store_or_evict(self, data, key, there, heard):
        tier = data.draw(st.sampled_from(self.made.tiers))
        if there:
            tier.kept[key] = content(key)
            tier.keys.add(key)
        else:
            tier.kept.pop(key, None)
            if heard:
                tier.keys.discard(key)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, STUCK_SECONDS + 1]))
    def time_passes(self, seconds):
        self.made.clock.now += seconds

    @rule()
    def poll(self):
        used = self.host.used_bytes
        heard, self.hits = self.hits, set()
        before = [set(self.made.jobs(number)) for number in range(len(self.queues))]
        self.cache.poll()
        for number, key in sorted(heard):
            for faster in range(number):
                if self.host.contains([key])[0] or key in self.cache.slow_tiers[faster].queued:
                    self.note_owed(faster, key)
        self.note_lost()
        self.check_write_back(before, used)

    def check_write_back(self, before, used):
        for number, queue in enumerate(self.queues):
            writes = {job for job in set(self.made.jobs(number)) - before[number] if job[0] == "write"}
            if writes and queue.name in self.write_back:
                most = max(used, self.host.used_bytes)
                assert most > WRITE_BACK_SHARE * self.host.capacity_bytes

    @rule(key=st.sampled_from(KEYS))
    def leave(self, key):
        """As if others had taken its room."""
        self.made.leave(key)
        self.counted = -1, None

    @rule()
    def clear(self):
        self.cache.clear()
        self.owed = [set() for _ in self.queues]

    # -- what holds -------------------------------------------------------------------------------------

    @invariant()
    def host_memory_is_sound(self):
        if hasattr(self, "made"):
            self.host.check_integrity()

    @invariant()
    def no_count_changes_without_an_event(self):
        if not hasattr(self, "made"):
            return
        cache = self.cache
        counts = asdict(cache.counts), asdict(cache.host.counters), [one.lost for one in cache.slow_tiers]
        assert cache.events != self.counted[0] or counts == self.counted[1]
        self.counted = cache.events, counts

    @invariant()
    def no_slot_is_written_while_anybody_else_uses_it(self):
        if not hasattr(self, "made"):
            return
        uses = [(slot.offset, size_of(slot.key), True) for slot in self.fills]
        uses += [(slot.offset, size_of(slot.key), False) for slot in self.held()]
        for queue in self.queues:
            for what, key, memory in jobs_of(queue):
                at = np.frombuffer(memory, np.uint8).ctypes.data - self.made.base
                assert memory.nbytes == size_of(key)
                uses.append((at, memory.nbytes, what == "read"))
        for tier in self.made.tiers:
            for _, memory in tier.late:
                at = np.frombuffer(memory, np.uint8).ctypes.data - self.made.base
                uses.append((at, memory.nbytes, True))
        uses.sort()
        for (at, size, writes), (other, _, other_writes) in itertools.pairwise(uses):
            assert at + size <= other or at == other
            assert at != other or not (writes or other_writes)

    def held(self):
        return self.taken + [slot for fetch, _, _ in self.loads for _, slot in fetch.ready]

    @invariant()
    def what_is_ready_is_what_was_stored(self):
        if hasattr(self, "made"):
            for slot in self.held():
                assert self.made.at(slot).tobytes() == content(slot.key)

    @invariant()
    def a_fetch_is_over_with_all_it_wants_or_with_a_failure(self):
        for fetch, keys, taken in getattr(self, "loads", []):
            here = taken + [of.key for of, _ in fetch.ready]
            assert len(here) == len(set(here))
            if fetch.over and fetch.failure is None:
                assert sorted(here) == sorted(keys)
            else:
                assert set(here) <= set(keys)
            if not fetch.over:
                assert self.cache.busy
            assert self.cache.awaited_tiers(fetch) <= {queue.name for queue in self.queues}

    @invariant()
    def every_hold_is_somebodys(self):
        if hasattr(self, "made"):
            unheard = sum(q.reads.count + q.writes.count - len(jobs_of(q)) for q in self.queues)
            jobs = sum(len(jobs_of(queue)) for queue in self.queues)
            held = len(self.fills) + len(self.held()) + len(self.cache._late)
            assert self.made.host.holds == held + jobs + unheard

    def teardown(self):
        if not hasattr(self, "made"):
            return
        for slot in self.fills:
            self.filled(slot)
        for fetch, _, _ in self.loads:
            self.cache.cancel(fetch)
        for slot in self.taken:
            self.cache.host.close(slot)
        self.cache.poll()
        while any(map(jobs_of, self.queues)):
            for number, queue in enumerate(self.queues):
                for what, key, _ in jobs_of(queue):
                    self.end(number, what, key, GetOutcome.HIT if what == "read" else PutOutcome.STORED)
            self.cache.poll()
        self.end_all_late()
        owed = [set(writing.queued) for writing in self.cache.slow_tiers]
        here = [{key for key in keys if self.host.contains([key])[0]} for keys in owed]
        for tier in self.made.tiers:
            tier.next_put = PutOutcome.STORED
        self.cache.shutdown(1.0)
        self.cache.poll()
        for tier, keys in zip(self.made.tiers, here, strict=True):
            left = [key for key in keys - tier.kept.keys() if not tier.contains([key])[0]]
            assert not left, "what is owed is written in the end"
            assert tier.closed
        self.host.check_integrity()
        assert self.made.host.holds == 0


TestLiving = Living.TestCase
TestLiving.settings = examples(100, stateful_step_count=40)


FULL, OTHER, THIRD = (key for key in KEYS if GROUPS[group_of(key)].kind is GroupKind.FULL)


def cache(*kept, pages=34, **options):
    """With tiers that have these chunks: first a file tier, then an object tier."""
    tiers = fake_tiers(*([(key, content(key)) for key in keys] for keys in kept))
    return Cache(ARENA, pages, tiers, **options)


def names_of(fetch):
    return [of.key for of, _ in fetch.ready]


def test_a_chunk_in_host_memory_is_ready_at_once():
    made = cache()
    made.store(FULL, OTHER)
    fetch = made.fetch(FULL, OTHER)
    assert (fetch.over, names_of(fetch), fetch.tiers) == (True, [FULL, OTHER], {"host"})
    assert made.cache.origin(fetch) == "host"


def test_chunk_of_the_slowest_tier_is_read_once_and_written_to_the_faster_one():
    made = cache([], [FULL])
    first, second = made.fetch(FULL), made.fetch(FULL)
    assert made.cache.origin(first) == "object"
    assert made.jobs(1) == [("read", FULL)]
    made.answer(1, "read", FULL, GetOutcome.HIT)
    assert names_of(first) == names_of(second) == [FULL]
    assert made.jobs(0) == [("write", FULL)]
    assert made.cache.counts.fetched == Counter({"object": 2})


def test_recomputed_chunk_is_written_to_the_tiers_that_lack_it():
    made = cache([], [FULL])
    made.store(FULL)
    made.cache.poll()
    assert (made.jobs(0), made.jobs(1)) == ([("write", FULL)], [])


def test_chunk_that_a_tier_misses_comes_from_the_next_one():
    made = cache([FULL], [FULL])
    fetch = made.fetch(FULL)
    assert made.cache.awaited_tiers(fetch) == {"file"}
    made.answer(0, "read", FULL, GetOutcome.CORRUPT)
    assert made.cache.awaited_tiers(fetch) == {"object"}
    made.answer(1, "read", FULL, GetOutcome.HIT)
    assert (fetch.failure, names_of(fetch), fetch.tiers) == (None, [FULL], {"object"})
    assert made.cache.counts.missed == Counter({("file", GetOutcome.CORRUPT): 1})


def test_load_fails_if_a_chunk_is_missing_and_keeps_its_other_chunks():
    made = cache([FULL, OTHER])
    fetch = made.fetch(FULL, OTHER)
    made.answer(0, "read", FULL, GetOutcome.ABSENT)
    assert (fetch.over, fetch.failure) == (True, "a chunk of the file tier: absent")
    made.cache.cancel(fetch)
    made.answer(0, "read", OTHER, GetOutcome.HIT)
    assert made.host.contains([FULL, OTHER]).tolist() == [False, True]
    assert made.host.holds == 0


@pytest.mark.parametrize(
    ("what", "struck"),
    [(GetOutcome.IO_ERROR, {"file"}), (GetOutcome.ABSENT, set()), (GetOutcome.CORRUPT, set())],
)
def test_failed_tiers_of_a_load_are_those_with_io_errors(what, struck):
    made = cache([FULL])
    fetch = made.fetch(FULL)
    made.answer(0, "read", FULL, what)
    assert fetch.failed == struck


def test_chunk_whose_read_is_late_is_read_into_another_slot_and_the_first_is_kept_until_the_read_ends():
    made = cache([FULL])
    fetch = made.fetch(FULL)
    ((_, _, first),) = jobs_of(made.queues[0])
    made.answer(0, "read", FULL, LateFetch)
    ((_, _, second),) = jobs_of(made.queues[0])
    assert not fetch.over
    made.answer(0, "read", FULL, GetOutcome.HIT)
    assert names_of(fetch) == [FULL]
    assert not made.cache.busy, "an engine without requests waits for nothing"
    used = made.host.used_bytes
    end_late(made.tiers[0])
    assert bytes(second) == content(FULL)
    made.cache.poll()
    assert made.host.used_bytes == used - len(first)


def test_late_read_of_a_chunk_that_no_other_engine_has_fails_the_load():
    made = cache([FULL])
    fetch = made.fetch(FULL)
    made.tiers[0].keys.discard(FULL)
    made.answer(0, "read", FULL, LateFetch)
    assert (fetch.over, fetch.failure, fetch.miss) == (
        True,
        "a chunk of the file tier: late",
        GetOutcome.LATE,
    )
    assert made.host.holds == 1


def test_chunk_evicted_between_offer_and_load_fails_the_load():
    fetch = cache([]).fetch(FULL)
    assert (fetch.over, fetch.failure) == (True, "a chunk has gone since it was offered")


def test_a_chunk_that_ranks_are_filling_is_waited_for():
    made = cache([FULL])
    slot = made.cache.reserve(FULL, group_of(FULL))
    fetch = made.fetch(FULL)
    made.cache.poll()
    assert not fetch.over
    assert made.jobs(0) == []
    made.fill(slot)
    made.cache.poll()
    assert names_of(fetch) == [FULL]


def test_a_chunk_that_ranks_could_not_fill_is_read_after_all():
    made = cache([FULL])
    slot = made.cache.reserve(FULL, group_of(FULL))
    made.fetch(FULL)
    made.cache.filled(slot, 0, "the block is gone")
    made.cache.poll()
    assert made.jobs(0) == [("read", FULL)]
    assert made.cache.counts.failed == 1


def test_a_load_larger_than_host_memory_goes_on_as_its_chunks_are_used():
    made = cache([FULL, OTHER, THIRD], pages=12)
    for key in KEYS[1:3]:  # ranks fill two of three slabs
        assert made.cache.reserve(key, group_of(key))
    fetch, taken = made.fetch(FULL, OTHER, THIRD), []
    while not fetch.over:
        (what, key), *_ = made.jobs(0)
        made.answer(0, what, key, GetOutcome.HIT)
        for of, slot in fetch.take():
            assert made.at(slot).tobytes() == content(of.key)
            taken.append(of.key)
            made.cache.host.close(slot)
        made.cache.poll()
    assert fetch.failure is None
    assert taken + names_of(fetch) == [FULL, OTHER, THIRD]
    assert len(made.host) < 3


def test_beginning_of_a_prompt_outlasts_its_end_after_a_load():
    prompt = [b"%031d" % n + b"\0" for n in range(8)]
    tiers = fake_tiers([(key, content(key)) for key in prompt])
    made = Cache(ARENA, 8 * GROUPS[0].chunk_bytes // PAGE, tiers)
    fetch = made.cache.fetch([PromptChunk(0, number, key, CHUNK) for number, key in enumerate(prompt)])
    while not fetch.over:  # as they come, from the first on
        made.answer(0, "read", made.jobs(0)[0][1], GetOutcome.HIT)
        for _, slot in fetch.take():
            made.cache.host.close(slot)
    assert made.host.contains(prompt).all()
    made.cache.mark_used(prompt)
    for number in range(4):
        slot = made.cache.reserve(b"%031d" % (100 + number) + b"\0", 0)
        made.cache.filled(slot, CHUNK, None)
    assert made.host.contains(prompt).tolist() == [True] * 4 + [False] * 4


def test_cold_chunks_leave_host_memory_first_until_they_are_used():
    made = cache([], pages=34)
    for key, cold in zip(KEYS[:3], (False, True, True), strict=True):
        made.cache.filled(made.cache.reserve(key, 0), CHUNK, None, cold=cold)
    made.cache.mark_used([KEYS[2]])
    made.cache.filled(made.cache.reserve(KEYS[3], 0), CHUNK, None)
    made.cache.mark_used([], cold=[KEYS[3]])
    order = [made.policy.evict() for _ in range(4)]
    assert order == [KEYS[1], KEYS[3], KEYS[0], KEYS[2]]


def test_chunk_held_while_its_prompt_is_used_is_ranked_when_released():
    made = cache([], pages=34)
    made.store(*KEYS[:3])
    ((_, slot),) = made.fetch(KEYS[1]).take()
    made.cache.mark_used(KEYS[:3])
    made.cache.host.close(slot)
    order = [made.policy.evict() for _ in range(3)]
    assert order == [KEYS[2], KEYS[0], KEYS[1]]


def test_read_that_ends_after_clear_is_dropped():
    made = cache([FULL])
    fetch = made.fetch(FULL)
    made.cache.clear()
    made.answer(0, "read", FULL, GetOutcome.HIT)
    assert (fetch.over, fetch.failure) == (True, "the cache was reset")
    assert made.host.holds == made.host.used_bytes == 0


def test_a_chunk_being_written_while_all_is_forgotten_may_be_stored_anew():
    made = cache([])
    made.store(FULL)
    made.cache.poll()
    made.cache.clear()
    made.store(FULL)
    made.cache.poll()
    assert made.host.used_bytes == 2 * size_of(FULL), "the first is still being read"
    assert made.jobs(0) == [("write", FULL)], "equal keys are equal bytes"
    made.answer(0, "write", FULL, PutOutcome.STORED)
    assert made.host.used_bytes == size_of(FULL)
    assert made.tiers[0].kept == {FULL: content(FULL)}


def test_write_back_waits_until_host_memory_is_half_full_and_the_end():
    made = cache([], pages=16, write_back=("file",))
    made.store(FULL)
    made.cache.poll()
    assert (made.jobs(0), made.cache.busy) == ([], False)
    made.store(OTHER, THIRD)
    assert made.cache.busy
    made.cache.poll()
    assert made.jobs(0)[0] == ("write", FULL), "the oldest first"


def test_write_back_writes_all_at_the_end():
    made = cache([], write_back=("file",))
    made.store(FULL, OTHER)
    made.cache.shutdown(1.0)
    assert made.tiers[0].kept.keys() == {FULL, OTHER}
    assert made.tiers[0].closed


def test_chunk_evicted_before_its_write_counts_as_lost():
    made = cache([])
    made.store(FULL)
    made.leave(FULL)
    made.cache.poll()
    assert (made.jobs(0), made.cache.slow_tiers[0].lost) == ([], 1)


def test_a_tier_takes_only_so_many_stores_at_once():
    made = cache([], pages=34, writers=1)
    made.store(*KEYS[:5])
    made.cache.poll()
    assert (made.jobs(0), made.cache.busy) == ([("write", key) for key in KEYS[:4]], True)
    made.answer(0, "write", KEYS[0], PutOutcome.STORED)
    assert made.jobs(0) == [("write", key) for key in KEYS[1:5]]
    for key in KEYS[1:5]:
        assert made.cache.busy, "steps go on until its end is heard of"
        made.answer(0, "write", key, PutOutcome.STORED)
    assert (made.jobs(0), made.cache.busy) == ([], False)
    assert len(made.queues[0].write_seconds) == 5


def hung(*kept):
    """A file tier that does not answer for `FULL`."""
    made = cache(*kept)
    fetch = made.fetch(FULL)
    made.clock.now += STUCK_SECONDS + 1
    return made, fetch


def test_tier_stuck_for_reading_gets_no_reads_but_writes():
    made, _ = hung([FULL, OTHER])
    assert not made.cache.available([FULL, OTHER]).any()
    made.store(THIRD)
    made.cache.poll()
    assert made.jobs(0) == [("read", FULL), ("write", THIRD)]


def test_hanging_read_of_a_cancelled_load_keeps_no_engine_busy():
    made, fetch = hung([FULL])
    assert made.cache.busy
    made.cache.cancel(fetch)
    made.cache.poll()
    assert not made.cache.busy
    made.answer(0, "read", FULL, GetOutcome.HIT)
    assert made.host.contains([FULL]).all(), "it is heard of in whichever step comes next"


def test_chunk_whose_read_hangs_is_unavailable_though_another_tier_has_it():
    made, _ = hung([FULL, OTHER], [FULL, OTHER])
    assert made.cache.available([FULL, OTHER]).tolist() == [False, True]


def test_excluded_tier_is_not_read():
    made = cache([FULL, OTHER], [FULL])
    assert made.cache.available([FULL, OTHER], {"file"}).tolist() == [True, False]
    made.fetch(FULL, without={"file"})
    assert (made.jobs(0), made.jobs(1)) == ([], [("read", FULL)])


def test_paused_tier_is_not_read():
    made = cache([FULL, OTHER], [FULL])
    made.tiers[0].rests = True
    assert made.cache.available([FULL, OTHER]).tolist() == [True, False]
    made.fetch(FULL)
    assert (made.jobs(0), made.jobs(1)) == ([], [("read", FULL)])


def test_tiers_of_one_cache_share_a_table_of_tags():
    made = cache([FULL])
    with pytest.raises(ValueError, match="share one key table"):
        ChunkCache(
            HostTier(PAGE, [PAGE], EVICTION_POLICIES["lru"]),
            ARENA.bytes_at,
            GROUPS[:1],
            made.queues[:1],
        )


def test_chunk_that_an_excluded_tier_is_reading_is_unavailable():
    made = cache([FULL], [FULL])
    made.fetch(FULL)
    assert not made.cache.available([FULL], {"file"}).any()
    made.store(OTHER)
    assert made.cache.available([OTHER], {"file", "object"}).all()


def test_all_tiers_together_get_the_time_that_closing_may_take():
    given, clock = [], Clock(100.0)

    class Slow(TierQueue):
        def close(self, patience_seconds):
            given.append(patience_seconds)
            clock.now += 7

    tiers = fake_tiers([], [])
    queues = [Slow(tier, tier.name, 0, 0, refresh_seconds=None) for tier in tiers]
    host = HostTier(34 * PAGE, [PAGE], EVICTION_POLICIES["lru"], table_of(tiers))
    ChunkCache(host, ARENA.bytes_at, GROUPS[:1], queues, clock).shutdown(10.0)
    assert given == [10.0, 3.0]


def test_reads_that_fill_host_memory_let_a_write_back_tier_write():
    (tier,) = fake_tiers([(key, content(key)) for key in KEYS[1:]])
    cache = Cache(ARENA, 34, [tier], write_back=("file",))
    cache.store(KEYS[0])
    cache.cache.poll()
    assert cache.jobs(0) == []
    assert not any(cache.cache.agenda)
    cache.fetch(*KEYS[1:])
    assert cache.host.used_bytes > WRITE_BACK_SHARE * cache.host.capacity_bytes
    cache.cache.poll()
    assert ("write", KEYS[0]) in cache.jobs(0)
