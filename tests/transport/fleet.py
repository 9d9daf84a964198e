"""An engine of a fleet, without the rest of an engine: host memory, and the fleet tier."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, suppress
from hashlib import sha256, shake_128
from multiprocessing import get_context

from kvferry.cache.chunk_cache import ChunkCache, PromptChunk
from kvferry.cache.tier_queue import TierQueue
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.keys.namespace import Namespace
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.fleet.tier import FleetPlace, FleetTier
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from kvferry.transport.addresses import parse_allowed_peers
from kvferry.transport.security import random_keys
from support.models import attention, model, state
from support.namespaces import Host, enter

KV = attention(k=8, v=8)
MODEL = model(KV, KV, LayerCache(GroupKind.SLIDING, 24, KV.fields), state())
RANKS = lay_out(MODEL, EngineShape(1, (4,), 16, "LBHNC", 9))
CANONICAL = canonical_form_of(RANKS, 64)
GROUPS = CANONICAL.groups
SECRET = random_keys()
CAPACITY = 8 << 20


def namespace(weights="0123"):
    return Namespace.of(
        weights=weights, model={}, dtype="bfloat16", kv_dtype="auto", scales={}, form=["chunks"], name="m"
    )


def key(number, group=0):
    return sha256(b"%d" % number).digest()[:31] + bytes((group,))


def content(name):
    """The bytes of a chunk's body: what its key names, and zeros after each section."""
    return shake_128(name).digest(GROUPS[name[-1]].chunk_bytes)


class Engine:
    """Host memory with a fleet tier, without the rest of an engine. `engines` are addresses."""

    def __init__(self, *, engines=(), weights="0123", keys=SECRET, host="127.0.0.1", **settings):
        self.address = host, 0
        settings.setdefault("find_seconds", 2.0)  # a busy machine answers late
        with ExitStack() as made:
            self.arena = Arena.create(CAPACITY)
            made.callback(self.arena.close)
            sizes = [group.chunk_bytes for group in GROUPS]
            self.host = HostTier(CAPACITY, sizes, EVICTION_POLICIES["lru"], KeyTable())
            self.woken = 0
            self.tier = FleetTier(
                FleetSettings(engines=tuple(f"{name}:{port}" for name, port in engines), **settings),
                namespace(weights),
                FleetPlace(
                    host_tier=self.host,
                    arena=self.arena,
                    groups=GROUPS,
                    keys=keys,
                    peers=parse_allowed_peers(None, host, None),
                    host=host,
                    advertise_host=host,
                    ports=None,
                    port_offset=0,
                    wake=self.wake,
                ),
            )
            made.callback(self.tier.close)
            assert self.tier.ready.wait(30)
            self.address = host, self.tier.server.port
            self.made = made.pop_all()

    def wake(self):
        self.woken += 1

    @property
    def port(self):
        return self.address[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.made.close()

    def store(self, *names):
        for name in names:
            slot = self.host.reserve(name, name[-1])
            self.arena.bytes_at(slot.offset, slot.size)[:] = content(name)
            assert self.host.commit(slot)

    def served(self):
        return self.tier.server.served

    def check(self):
        self.host.check_integrity()

    def find(self, *names, hints=()):
        search = self.tier.find(list(names), hints)
        deadline = time.monotonic() + 5
        while search is not None and not search.over:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        return self.tier.contains(names).tolist()

    def get(self, name):
        """Fetch a chunk as the cache does; return the outcome, and whether the bytes are right."""
        slot = self.host.reserve(name, name[-1])
        group = GROUPS[name[-1]]
        what = self.tier.get(name, chunk_group(group, 64), self.arena.bytes_at(slot.offset, slot.size))
        right = bytes(self.arena.bytes_at(slot.offset, slot.size)) == content(name)
        if what is GetOutcome.HIT:
            self.host.commit(slot)
        else:
            self.host.abort(slot)
        return what, right


class Reader(Engine):
    """An engine whose cache fetches chunks, as an engine's steps do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.cache = ChunkCache(self.host, self.arena.bytes_at, GROUPS, [TierQueue(self.tier, "fleet")])
        self._gate: threading.Event | None = None

    def hold_reads(self):
        """Let READs begin only with `release_reads`: the holder has said where the chunk is."""
        read, gate = self.tier._reader.read, threading.Event()
        self.tier._reader.read, self._gate = lambda *of: (gate.wait(), read(*of)), gate

    def release_reads(self):
        self._gate.set()

    def begin(self, *names):
        """Fetch chunks. Return how many are known."""
        known = sum(self.find(*names))
        self.fetch = self.cache.fetch([PromptChunk(name[-1], 0, name, 64) for name in names])
        return known

    def end(self, seconds):
        """Return the seconds that the fetch took, why it failed, and how many chunks it has brought."""
        began = time.monotonic()
        while not self.fetch.over and time.monotonic() < began + seconds:
            self.cache.poll()
            time.sleep(1e-3)
        took, slots = time.monotonic() - began, self.fetch.take()
        for of, slot in slots:
            assert bytes(self.arena.bytes_at(slot.offset, slot.size)) == content(of.key)
            self.host.close(slot)
        return took, self.fetch.failure if self.fetch.over else "it is still under way", len(slots)

    def late(self):
        """Return the slots, and the bytes, that late reads hold."""
        self.cache.poll()
        return len(self.cache._late), self.tier._reader.late_bytes


def serve(pipe, place, kind, options):
    """Be an engine on a host, until its other end of the pipe is closed."""
    enter(place.name)
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": place.device}
    with kind(host=place.address, **options) as engine:
        pipe.send(engine.address)
        with suppress(EOFError):
            while True:
                method, *arguments = pipe.recv()
                pipe.send(getattr(engine, method)(*arguments))


class There:
    """An engine on a host, in a process of its own. `call` calls a method of it."""

    def __init__(self, place: Host, kind=Engine, **options):
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, place, kind, {"keys": SECRET, **options}))
        self._process.start()
        other.close()
        self.address = self._hear()

    def _hear(self):
        assert self._pipe.poll(60), "the engine does not answer"
        return self._pipe.recv()

    def call(self, *of):
        self._pipe.send(of)
        return self._hear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pipe.close()
        self._process.join(20)
        assert self._process.exitcode == 0, "the engine does not end"
