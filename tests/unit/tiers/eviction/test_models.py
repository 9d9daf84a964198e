"""Every policy against a plain model of it: lists of (key, size), searched from end to end."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.tiers.eviction import EVICTION_POLICIES
from support.examples import examples

KEYS = [bytes([n]) for n in range(24)]


def size_of(entries):
    return sum(size for _, size in entries)


def without(entries, key):
    return [entry for entry in entries if entry[0] != key]


class Model:
    """What all models share: named lists of (key, size), oldest first, and which keys are pinned.

    The keys in the list "cold" are evicted first. No other list has any of them.
    """

    GHOSTS = ()

    def __init__(self, capacity):
        self.capacity = capacity
        self.lists = {name: [] for name in (*self.NAMES, "cold")}
        self.pinned = set()

    def home(self, key):
        return next((name for name in (*self.HOMES, "cold") if key in dict(self.lists[name])), None)

    def entries(self):
        return [entry for name in (*self.HOMES, "cold") for entry in self.lists[name]]

    def admit(self, key, size, *, cold=False):
        if cold:
            self.take(key, self.GHOSTS)
            self.lists["cold"].append((key, size))
        else:
            self.admit_warm(key, size)

    def warm_up(self, key):
        """A cold key that is used is admitted anew. It stays pinned."""
        if (size := self.take(key, ["cold"])) is not None:
            self.admit_warm(key, size)

    def make_cold(self, key):
        if (size := self.take(key, self.HOMES)) is not None:
            self.lists["cold"].append((key, size))

    def touch(self, key):
        self.warm_up(key)
        self.touch_warm(key)

    def evict(self):
        if loose := self.unpinned("cold"):
            self.take(loose[0][0], ["cold"])
            return loose[0][0]
        return self.evict_warm()

    def take(self, key, names):
        """Remove a key from the lists of these names; its size, or None."""
        for name in names:
            if key in dict(self.lists[name]):
                size = dict(self.lists[name])[key]
                self.lists[name] = without(self.lists[name], key)
                return size
        return None

    def unpinned(self, name):
        return [entry for entry in self.lists[name] if entry[0] not in self.pinned]

    def trim(self, name, most):
        while size_of(self.lists[name]) > most:
            self.lists[name].pop(0)

    def make_newest(self, key):
        """Newest in its list; one that is pinned will be when it is unpinned."""
        self.warm_up(key)
        if (name := self.home(key)) is not None:
            size = self.take(key, [name])
            self.lists[name].append((key, size))

    def pin(self, key):
        self.pinned.add(key)

    def unpin(self, key):
        """Newest in its list."""
        name = self.home(key)
        size = self.take(key, [name])
        self.lists[name].append((key, size))
        self.pinned.discard(key)

    def remove(self, key):
        self.take(key, (*self.HOMES, "cold"))
        self.pinned.discard(key)


class LRUModel(Model):
    NAMES = HOMES = ("all",)

    def admit_warm(self, key, size):
        self.lists["all"].append((key, size))

    def touch_warm(self, key):
        size = self.take(key, ["all"])
        self.lists["all"].append((key, size))

    def evict_warm(self):
        if not (loose := self.unpinned("all")):
            return None
        self.take(loose[0][0], ["all"])
        return loose[0][0]


class ARCModel(Model):
    NAMES = ("T1", "T2", "B1", "B2")
    HOMES = ("T1", "T2")
    GHOSTS = ("B1", "B2")
    p = 0.0

    def admit_warm(self, key, size):
        b1, b2 = size_of(self.lists["B1"]), size_of(self.lists["B2"])
        to = "T2"
        if self.take(key, ["B1"]) is not None:
            self.p = min(self.capacity, self.p + size * max(1, b2 / b1))
        elif self.take(key, ["B2"]) is not None:
            self.p = max(0, self.p - size * max(1, b1 / b2))
        else:
            to = "T1"
        self.lists[to].append((key, size))
        self.bound()

    def touch_warm(self, key):
        size = self.take(key, self.HOMES)
        self.lists["T2"].append((key, size))

    def evict_warm(self):
        names = ["T1", "T2"] if size_of(self.lists["T1"]) > self.p else ["T2", "T1"]
        for name in names:
            if loose := self.unpinned(name):
                self.take(loose[0][0], [name])
                self.lists["B" + name[1]].append(loose[0])
                self.bound()
                return loose[0][0]
        return None

    def bound(self):
        self.trim("B1", self.capacity - size_of(self.lists["T1"]))
        self.trim("B2", 2 * self.capacity - size_of(self.entries()) - size_of(self.lists["B1"]))


class S3FIFOModel(Model):
    NAMES = ("S", "M", "G")
    HOMES = ("S", "M")
    GHOSTS = ("G",)

    def __init__(self, capacity):
        super().__init__(capacity)
        self.uses = {}

    def admit_warm(self, key, size):
        name = "S" if self.take(key, ["G"]) is None else "M"
        self.lists[name].append((key, size))
        self.uses[key] = 0

    def touch_warm(self, key):
        self.uses[key] = min(3, self.uses[key] + 1)

    def evict_warm(self):
        share = self.capacity // 10
        while self.unpinned("S") or self.unpinned("M"):
            small = self.unpinned("S") and (size_of(self.lists["S"]) >= share or not self.unpinned("M"))
            key, size = self.unpinned("S" if small else "M")[0]
            self.take(key, self.HOMES)
            if small and self.uses[key] > 1:
                self.uses[key] = 0
                self.lists["M"].append((key, size))
            elif not small and self.uses[key] > 0:
                self.uses[key] -= 1
                self.lists["M"].append((key, size))
            else:
                if small:
                    self.lists["G"].append((key, size))
                    self.trim("G", self.capacity - share)
                return key
        return None


MODELS = {"lru": LRUModel, "arc": ARCModel, "s3fifo": S3FIFOModel}


class Comparison(RuleBasedStateMachine):
    """One policy and its model, driven together."""

    name: str

    @initialize(capacity=st.integers(20, 120))
    def make(self, capacity):
        self.policy = EVICTION_POLICIES[self.name](capacity)
        self.model = MODELS[self.name](capacity)

    def known(self, data, *, pinned=None):
        keys = [key for key, _ in self.model.entries()]
        if pinned is not None:
            keys = [key for key in keys if (key in self.model.pinned) == pinned]
        return data.draw(st.sampled_from(sorted(keys))) if keys else None

    def evict_one(self):
        victim = self.policy.evict()
        assert victim == self.model.evict()
        assert victim is None or victim not in self.model.pinned
        return victim

    @rule(key=st.sampled_from(KEYS), size=st.integers(1, 20), cold=st.booleans())
    def use(self, key, size, cold):
        """As a cache does: touch what is there, else make room and admit."""
        if key in self.policy:
            self.policy.touch(key)
            self.model.touch(key)
            return
        while self.policy.used_bytes + size > self.policy.capacity_bytes:
            if self.evict_one() is None:
                return
        self.policy.admit(key, size, cold=cold)
        self.model.admit(key, size, cold=cold)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), size=st.integers(1, 9), cold=st.booleans())
    def admit_all(self, keys, size, cold):
        """As many at once, as one after the other."""
        new = [key for key in keys if key not in self.policy]
        while self.policy.used_bytes + size * len(new) > self.policy.capacity_bytes:
            if self.evict_one() is None:
                return
        self.policy.admit_all(new, size, cold=cold)
        for key in new:
            self.model.admit(key, size, cold=cold)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def make_newest(self, keys):
        """Those that are not there are skipped."""
        self.policy.make_newest(keys)
        for key in keys:
            self.model.make_newest(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def make_cold(self, keys):
        """Those that are not there are skipped."""
        self.policy.make_cold(keys)
        for key in keys:
            self.model.make_cold(key)

    @rule()
    def evict(self):
        self.evict_one()

    @rule(size=st.integers(0, 60))
    def evict_bytes(self, size):
        """As many as are needed, one after the other."""
        before, expected = size_of(self.model.entries()), []
        while before - size_of(self.model.entries()) < size and (key := self.model.evict()) is not None:
            expected.append(key)
        assert self.policy.oldest(size) in (expected, None)
        assert self.policy.evict_bytes(size) == expected

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def touch_all(self, keys):
        """All are used before the ranks are set."""
        known = [key for key in keys if key in self.policy]
        self.policy.touch_all(known)
        for step in (self.model.touch, self.model.make_newest):
            for key in known:
                step(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def pin_all(self, keys):
        free = [key for key in keys if key in self.policy and key not in self.model.pinned]
        self.policy.pin_all(free)
        for key in free:
            self.model.pin(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def unpin_all(self, keys):
        pinned = [key for key in keys if key in self.model.pinned]
        self.policy.unpin_all(pinned)
        for key in pinned:
            self.model.unpin(key)

    @rule(data=st.data())
    def pin(self, data):
        if key := self.known(data, pinned=False):
            self.policy.pin(key)
            self.model.pin(key)

    @rule(data=st.data())
    def unpin(self, data):
        if key := self.known(data, pinned=True):
            self.policy.unpin(key)
            self.model.unpin(key)

    @rule(data=st.data())
    def remove(self, data):
        if key := self.known(data):
            self.policy.remove(key)
            self.model.remove(key)

    @precondition(lambda self: self.policy.used_bytes)
    @rule(data=st.data())
    def refuse(self, data):
        """What the contract says raises, raises and changes nothing."""
        key = self.known(data)
        with pytest.raises(ValueError, match="admitted already"):
            self.policy.admit(key, 1)
        with pytest.raises(ValueError, match="evict before admitting"):
            self.policy.admit(b"other", self.policy.capacity_bytes - self.policy.used_bytes + 1)
        with pytest.raises(KeyError):
            (self.policy.pin if key in self.model.pinned else self.policy.unpin)(key)
        with pytest.raises(ValueError, match="admitted already"):
            self.policy.admit_all([b"other", key], 1)
        free = self.policy.capacity_bytes - self.policy.used_bytes
        with pytest.raises(ValueError, match=r"2 chunks of .* evict before admitting"):
            self.policy.admit_all([b"other", b"more"], free // 2 + 1)
        for verb in (self.policy.touch, self.policy.pin, self.policy.unpin, self.policy.remove):
            with pytest.raises(KeyError):
                verb(b"other")

    @invariant()
    def same(self):
        self.policy.check_integrity()
        entries = self.model.entries()
        assert self.policy.used_bytes == size_of(entries)
        assert len(self.policy) == len(entries)
        assert all((key in self.policy) == (key in dict(entries)) for key in KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_evicts_what_a_plain_model_of_it_evicts(name):
    machine = type(f"Comparison_{name}", (Comparison,), {"name": name})
    machine.TestCase.settings = examples(60, stateful_step_count=60)
    case = machine.TestCase()
    case.runTest()


@pytest.mark.parametrize("name", MODELS)
def test_a_long_random_run_evicts_what_the_model_evicts(name):
    chance = random.Random(name)
    for capacity in (20, 50, 100):
        policy, model = EVICTION_POLICIES[name](capacity), MODELS[name](capacity)
        for _ in range(3000):
            key = KEYS[min(int(chance.expovariate(0.12)), len(KEYS) - 1)]
            if chance.random() < 0.1:
                some = chance.sample(KEYS, 5)
                policy.make_newest(some)
                for one in some:
                    model.make_newest(one)
            if chance.random() < 0.05:
                some = chance.sample(KEYS, 3)
                policy.make_cold(some)
                for one in some:
                    model.make_cold(one)
            if key in policy:
                policy.touch(key)
                model.touch(key)
                continue
            size = chance.randint(1, 8)
            while policy.used_bytes + size > capacity:
                victim = policy.evict()
                assert victim == model.evict()
            cold = chance.random() < 0.3
            policy.admit(key, size, cold=cold)
            model.admit(key, size, cold=cold)
        policy.check_integrity()
