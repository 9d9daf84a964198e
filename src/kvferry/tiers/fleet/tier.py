"""The fleet tier: chunks in the host memory of other engines, read over NIXL into this engine's host memory.

A chunk in host memory has a form that does not depend on the engine: any engine of the namespace can use it,
whatever its parallel size, block size and memory layout. So one engine's host memory is another's cache.

    find ─▶ (the holders of a prompt's chunks are known) ─▶ get: ask a holder where the chunk is
         ─▶ READ into this engine's arena ─▶ compare the digest ─▶ HIT

The tier also serves: other engines may read this engine's host memory. It stores nothing: chunks get into
host memory, and stay there, as without it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec import structs

from kvferry.common.errors import ChunkError, KVFerryError, TransferError
from kvferry.common.threads import Thread
from kvferry.common.units import parse_size
from kvferry.geometry import Region
from kvferry.geometry.canonical import CanonicalGroup
from kvferry.keys.namespace import Namespace
from kvferry.tiers.fleet.arena_reader import ArenaReader
from kvferry.tiers.fleet.client import Answer, FleetClient
from kvferry.tiers.fleet.directory import Change, Directory
from kvferry.tiers.fleet.holder import FleetServer, HeldChunks, ServingRate
from kvferry.tiers.fleet.holders import KnownHolders, LookUp
from kvferry.tiers.fleet.messages import (
    MAX_KEYS,
    PROTOCOL,
    AskChunk,
    AskHeld,
    AskMemory,
    ChunkPlace,
    Held,
    HostMemory,
    NoChunk,
)
from kvferry.tiers.fleet.settings import FleetSettings
from kvferry.tiers.format.chunk import ChunkGroup
from kvferry.tiers.format.decode import content_digest
from kvferry.tiers.host.arena import Arena
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import TierKeys
from kvferry.tiers.names import GetOutcome, OutcomeCounter, PutOutcome, TierStats
from kvferry.tiers.storage_tier import LateFetch, StorageTier, StoreUsage
from kvferry.transport.addresses import AllowedPeers, PortRange, engine_text
from kvferry.transport.agent import Agent, restrict_ucx_to
from kvferry.transport.handshake import Address
from kvferry.transport.lease import LeaseWords, new_incarnation
from kvferry.transport.metadata_sandbox import MetadataSandbox
from kvferry.transport.metadata_validation import TRY_SECONDS, MetadataValidator
from kvferry.transport.security import Keys

logger = logging.getLogger(__name__)

# Time after which an engine that does not say where a chunk is counts as gone.
ANSWER_SECONDS = 2.0

# The first trial of an engine's metadata may have to wait until the process that tries it has started.
_FIRST_SECONDS = 6 * TRY_SECONDS

# Maximum number of changes of host memory that wait to be published, seconds of a busy engine. If the server
# hangs for longer, the oldest are lost: then the directory is stale until all is published again.
_MOST_CHANGES = 1 << 18

_UNREACHED = "see whether that engine runs, and whether this machine reaches it"
_ADVICE = {
    GetOutcome.CORRUPT: "the bytes that arrived differ from those of the engine that has the chunk: check "
    "the network, and report this to kvferry's authors",
    GetOutcome.OTHER_SHAPE: "the namespace is the same, the size is not: report this to kvferry's authors",
    GetOutcome.IO_ERROR: _UNREACHED,
    GetOutcome.LATE: _UNREACHED,
}
# Divisor of the arena that gives how many bytes late READs may hold. Beyond that, the tier pauses.
_LATE_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlace:
    """What the fleet tier of an engine needs to know of the engine."""

    host_tier: HostTier
    arena: Arena
    groups: Sequence[CanonicalGroup]
    keys: Keys
    peers: AllowedPeers
    host: str  # address to listen on
    advertise_host: str  # address for other engines
    ports: PortRange | None
    port_offset: int  # data-parallel index of the engine
    wake: Callable[[], None]  # makes the engine run a step soon


class FleetTier(StorageTier):
    """The fleet tier of one engine.

    Until all of the arena is allocated, and registered with NIXL, the tier finds nothing and serves nothing.

    Attributes:
        server: answers other engines; None until then.
        ready: set when the tier finds and serves chunks, or could not be started.
    """

    read_only = True

    def __init__(self, settings: FleetSettings, namespace: Namespace, place: FleetPlace) -> None:
        self._settings, self._namespace, self._place = settings, namespace.digest, place
        self._counter, self.find_seconds = OutcomeCounter(), settings.find_seconds
        self.keys = TierKeys(place.host_tier.keys.table)
        self._holders = KnownHolders(self.keys)
        self._own: Address | None = None  # this engine, if its own settings name it
        self._silent: set[Address] = set()  # engines that did not answer the last question
        self._runs: dict[Address, int] = {}  # incarnation of each holder whose arena was loaded last
        self.client = FleetClient(place.keys, place.peers)
        self.server: FleetServer | None = None
        self._reader: ArenaReader | None = None
        self._directory: Directory | None = None
        self._started = ExitStack()
        self._closing = False
        self.ready = threading.Event()
        self._starter = Thread(self._start, "kvferry-fleet-start")
        self._starter.start()

    @property
    def stats(self) -> TierStats:
        return self._counter.stats()

    @property
    def paused(self) -> bool:
        return (
            self._reader is not None
            and self._reader.late_bytes * _LATE_SHARE > self._place.arena.region.length
        )

    def find(self, keys: Sequence[bytes], hints: Sequence[Address] = ()) -> LookUp | None:
        if self._reader is None or not keys or self.paused:
            return None
        asked = [*dict.fromkeys((*hints, *self._settings.addresses))]
        if self._own in asked:
            asked.remove(self._own)
        directory, look_up = self._directory, LookUp(self._place.wake)
        parts = [list(keys[at : at + MAX_KEYS]) for at in range(0, len(keys), MAX_KEYS)]
        # No request waits for an engine that did not answer the last question.
        awaited = [address for address in asked if address not in self._silent]
        look_up.begin(len(parts) * len(awaited) + (directory is not None))
        if directory is not None:
            directory.find(keys, partial(self._on_found, look_up))
        for address in asked:
            for part in parts:
                request = AskHeld(0, PROTOCOL, self._namespace, part)
                future = self.client.ask(address, request, self._settings.find_seconds)
                waiting = look_up if address in awaited else None
                future.add_done_callback(partial(self._on_held, waiting, address, part))
        return None if look_up.over else look_up

    def put(self, key: bytes, group: ChunkGroup, body: memoryview, cold: bool = False) -> PutOutcome:
        raise NotImplementedError("the fleet tier stores nothing")

    def get(self, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        outcome, why = GetOutcome.ABSENT, ""
        late: LateFetch | None = None
        for holder in self._holders.of(key):
            try:
                outcome = self._get_from(holder, key, group, into)
            except TransferError as error:
                outcome, why = GetOutcome.IO_ERROR, f"engine {holder[0]}:{holder[1]}: {error}"
                self._holders.strike_out(holder)
                if isinstance(error, LateFetch):
                    outcome, late = GetOutcome.LATE, error
                    break
            if outcome is GetOutcome.HIT:
                break
            if outcome is not GetOutcome.BUSY:
                self._holders.remove(key, holder)
        if self._counter.count_get(outcome) and (advice := _ADVICE.get(outcome)):
            logger.warning("fleet tier: %s of chunk %s (%s); %s", outcome, key.hex(), why or "fetch", advice)
        if late is not None:
            raise late
        return outcome

    def usage(self) -> StoreUsage:
        server = self.server
        if server is None:
            return StoreUsage()
        return StoreUsage(
            served=server.served,
            served_bytes=server.served_bytes,
            refused=server.refused,
            address=engine_text((self._place.advertise_host, server.port)),
        )

    def refresh(self) -> int:
        self._holders.expire()
        if self._reader is not None:
            self._reader.poll_late()
        return 0

    def close(self) -> None:
        self._closing = True
        self._starter.join()
        self.client.close()
        self._started.close()

    def _start(self) -> None:
        try:
            self._place.arena.wait_allocated()
            if not self._closing:
                self._serve()
        except KVFerryError as error:
            logger.error("fleet tier: %s; this engine serves on without it", error)  # noqa: TRY400 - said in full
        except Exception:
            logger.exception("fleet tier: it does not start; this engine serves on without it")
        self.ready.set()

    def _serve(self) -> None:
        place, settings = self._place, self._settings
        words = LeaseWords(new_incarnation(), 1)
        arena = place.arena.region
        rate = None if settings.serve_per_second is None else parse_size(settings.serve_per_second)
        with ExitStack() as started:
            with restrict_ucx_to(place.host, place.ports):
                agent = Agent(f"kvferry-fleet/{words.incarnation:x}/{new_incarnation():x}")
            agent.register([arena, Region(words.address, words.array.nbytes)])
            validator = MetadataValidator(partial(MetadataSandbox, place.host, place.ports))
            started.callback(validator.close)
            reader = ArenaReader(agent, arena, validator)
            started.callback(reader.close)
            self.server = FleetServer(
                HeldChunks(place.host_tier, place.arena.bytes_at, place.groups, self._namespace),
                agent,
                arena,
                words,
                host=place.host,
                port=settings.port + place.port_offset if settings.port else place.ports or 0,
                keys=place.keys,
                peers=place.peers,
                rate=ServingRate(rate),
            )
            started.callback(self.server.close)
            if settings.directory is not None:
                place.host_tier.changes = changes = deque[Change](maxlen=_MOST_CHANGES)
                self._directory = Directory(
                    settings.directory,
                    self._namespace,
                    (place.advertise_host, self.server.port),
                    held=place.host_tier.readable_keys,
                    changes=changes,
                    find_seconds=settings.find_seconds,
                )
                started.callback(self._directory.close)
            self._reader = reader
            self._started = started.pop_all()
        logger.info(
            "fleet tier: other engines read host memory at %s:%d", place.advertise_host, self.server.port
        )

    def _on_held(
        self, look_up: LookUp | None, holder: Address, keys: Sequence[bytes], future: Future[Answer]
    ) -> None:
        answer = future.result()
        if answer is None:
            self._silent.add(holder)
        if isinstance(answer, Held):
            self._silent.discard(holder)
            if self.server is not None and answer.incarnation == self.server.incarnation:
                self._own = holder
            elif self._reader is not None and not self._reader.is_late(answer.incarnation):
                self._holders.readmit(holder)
                mask = answer.mask(len(keys))
                self._holders.add([keys[at] for at in np.flatnonzero(mask)], holder)
        if look_up is not None:
            look_up.answered()

    def _on_found(self, look_up: LookUp, found: Mapping[Address, Sequence[bytes]]) -> None:
        for holder, keys in found.items():
            self._holders.add(keys, holder)
        look_up.answered()

    def _get_from(self, holder: Address, key: bytes, group: ChunkGroup, into: memoryview) -> GetOutcome:
        """Read a chunk from one holder. Raise TransferError if it does not answer, or cannot be read."""
        place = self._ask_chunk(holder, key)
        if isinstance(place, NoChunk):
            return GetOutcome.BUSY if place.busy else GetOutcome.ABSENT
        if place.bytes != len(into):
            return GetOutcome.OTHER_SHAPE
        self._load_memory(holder, place.incarnation)
        reader = self._reader
        if reader is None:
            raise TransferError("the tier is not started")
        reader.read(place.incarnation, place.offset, into)
        try:
            if content_digest(self._namespace, key, group, into) == place.digest:
                return GetOutcome.HIT
        except ChunkError:
            return GetOutcome.OTHER_SHAPE
        # Usually the holder has reused the slot during the READ.
        again = self._ask_chunk(holder, key)
        same = structs.replace(again, number=place.number) == place
        return GetOutcome.CORRUPT if same else GetOutcome.ABSENT

    def _ask_chunk(self, holder: Address, key: bytes) -> ChunkPlace | NoChunk:
        request = AskChunk(0, PROTOCOL, self._namespace, key)
        answer = self.client.ask(holder, request, ANSWER_SECONDS).result()
        if not isinstance(answer, ChunkPlace | NoChunk):
            raise TransferError(f"it does not answer within {ANSWER_SECONDS:g} s")
        return answer

    def _load_memory(self, holder: Address, incarnation: int) -> None:
        """Have the transport metadata of a holder's arena loaded, unless it is."""
        assert self._reader is not None  # noqa: S101 - chunks are found only then
        if self._reader.knows(incarnation):
            return
        answer = self.client.ask(holder, AskMemory(0, PROTOCOL), ANSWER_SECONDS).result()
        if not isinstance(answer, HostMemory):
            raise TransferError(f"it does not answer within {ANSWER_SECONDS:g} s")
        if answer.incarnation != incarnation:
            raise TransferError("it has started anew")
        self._reader.add(answer, _FIRST_SECONDS)
        before = self._runs.get(holder)
        self._runs[holder] = incarnation
        if before is not None and before != incarnation:
            self._reader.forget(before)
