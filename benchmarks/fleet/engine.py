"""An engine's host memory with a fleet tier, without the rest of an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry.common.errors import TransferError
from kvferry.geometry.canonical import CanonicalGroup, canonical_form_of
from kvferry.keys.namespace import Namespace
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.fleet.arena_reader import ArenaReader
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.fleet.tier import FleetPlace, FleetTier
from kvferry.tiers.format.decode import chunk_group, content_digest
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import GetOutcome
from kvferry.tools.measuring.simulated import read_geometry
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.transport.addresses import parse_allowed_peers
from kvferry.transport.security import Keys

_HOST = "127.0.0.1"
_PATIENCE_SECONDS = 60.0
_NAMESPACE = Namespace.of(
    weights="0", model={}, dtype="bfloat16", kv_dtype="auto", scales={}, form=["benchmark"], name="benchmark"
)


@dataclass(frozen=True, slots=True)
class HostSetup:
    """Host memory to be made.

    Attributes:
        group: format of its chunks.
        chunks: number of chunks that it has room for.
        keys: keys of the fleet channel.
        engines: addresses of other engines, as in the setting.
    """

    group: CanonicalGroup
    chunks: int
    keys: Keys
    engines: tuple[str, ...] = ()


class HostMemory:
    """Host memory of one engine, with a fleet tier."""

    def __init__(self, setup: HostSetup) -> None:
        """Allocate the memory, and start the tier."""
        self._group, size = setup.group, setup.group.chunk_bytes
        capacity = (setup.chunks + 1) * size
        self._arena = Arena.create(capacity)
        self._host = HostTier(capacity, [size], EVICTION_POLICIES["lru"], KeyTable())
        self._tier = FleetTier(
            FleetSettings(engines=setup.engines, find_seconds=5.0),
            _NAMESPACE,
            FleetPlace(
                host_tier=self._host,
                arena=self._arena,
                groups=[setup.group],
                keys=setup.keys,
                peers=parse_allowed_peers(None, _HOST, None),
                host=_HOST,
                advertise_host=_HOST,
                ports=None,
                port_offset=0,
                wake=lambda: None,
            ),
        )
        self._tier.ready.wait(_PATIENCE_SECONDS)
        if self._tier.server is None:
            raise TransferError("the fleet tier has not started; see the lines above")

    def address(self) -> str:
        """Return the address of the fleet channel."""
        assert self._tier.server is not None  # noqa: S101 - the constructor has looked
        return f"{_HOST}:{self._tier.server.port}"

    def store(self, keys: Sequence[bytes]) -> None:
        """Fill chunks with random bytes."""
        for key in keys:
            if (slot := self._host.reserve(key, 0)) is None:
                raise TransferError("host memory is too small for the chunks of this benchmark")
            self._arena.bytes_at(slot.offset, slot.size)[:] = os.urandom(slot.size)
            self._host.commit(slot)

    def find(self, keys: Sequence[bytes]) -> float:
        """Ask the other engines for chunks; return the seconds until all have answered."""
        began = time.perf_counter()
        search = self._tier.find(keys)
        while search is not None and not search.over:
            time.sleep(1e-4)
        if not self._tier.contains(keys).all():
            raise TransferError("the other engine does not have the chunks that it has stored")
        return time.perf_counter() - began

    def fetch(self, keys: Sequence[bytes], threads: int) -> float:
        """Read chunks as an engine does, with threads of the tier; return the seconds. Forget them."""
        slots = [self._host.reserve(key, 0) for key in keys]
        group = chunk_group(self._group, 0)

        def get(number: int) -> GetOutcome:
            slot = slots[number]
            assert slot is not None  # noqa: S101 - as many as `chunks`
            return self._tier.get(keys[number], group, self._arena.bytes_at(slot.offset, slot.size))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: time.sleep(1e-3), range(threads)))  # so that all threads run
            began = time.perf_counter()
            outcomes = list(pool.map(get, range(len(keys))))
            seconds = time.perf_counter() - began
        for slot in slots:
            if slot is not None:
                self._host.abort(slot)
        if set(outcomes) != {GetOutcome.HIT}:
            raise TransferError(f"chunks were not read: {sorted(set(outcomes))}")
        return seconds

    def read_raw(self, keys: Sequence[bytes]) -> float:
        """READ the same bytes without asking and digests, one chunk after the other; return the seconds."""
        (holder,) = self._tier._holders.of(keys[0])  # noqa: SLF001 - the same READ, alone
        places = [self._tier._ask_chunk(holder, key) for key in keys]  # noqa: SLF001
        reader = self._tier._reader  # noqa: SLF001
        assert isinstance(reader, ArenaReader)  # noqa: S101 - the tier has started
        into = self._arena.bytes_at(0, self._group.chunk_bytes)
        began = time.perf_counter()
        for place in places:
            reader.read(place.incarnation, place.offset, into)  # type: ignore[union-attr]
        return time.perf_counter() - began

    def digest(self, keys: Sequence[bytes]) -> float:
        """Compute the digests of as many chunks in one thread; return the seconds."""
        body = memoryview(bytearray(self._group.chunk_bytes))
        group = chunk_group(self._group, 0)
        began = time.perf_counter()
        for key in keys:
            content_digest(_NAMESPACE.digest, key, group, body)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the tier, and free the memory."""
        self._tier.close()
        self._arena.close()


def chunk_format(model: str, chunk_tokens: int, block_tokens: int = 16) -> CanonicalGroup:
    """Return the format of the chunks of a model's first KV cache group, for an engine with one rank."""
    cache = read_geometry(model).cache
    shape = EngineShape(1, (len(cache.layers),), block_tokens, "LBNHC", 16)
    return canonical_form_of(lay_out(cache, shape), chunk_tokens).groups[0]
