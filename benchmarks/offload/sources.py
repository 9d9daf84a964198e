"""The sources of KV of one engine, without the engine: a peer, host memory, and three storage tiers.

All parts are the ones that a connector creates for such a configuration: admission, its sources, the cache
with its host memory, two directories and an object store with their threads, and a control channel to a peer
that answers. The index of chunks is in memory, as in a connector. No chunk has bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, NoReturn

from benchmarks.no_blocks import NoBlocks
from kvferry.cache.chunk_cache import ChunkCache
from kvferry.cache.tier_queue import TierQueue
from kvferry.common.errors import TransferError
from kvferry.connector.admission import Admission
from kvferry.connector.bids import PlaceTokens, Speeds
from kvferry.connector.blocks import Headroom, PartBlocks
from kvferry.connector.choosing import BidChooser
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.content import Adapters, Prompts, TurnNames, content_of
from kvferry.connector.engine import CacheGroup, PlainRequest
from kvferry.connector.events import EventStream
from kvferry.connector.peers.source import PeerSource
from kvferry.connector.peers.turns import TurnFinder
from kvferry.connector.source import RunningLoads, Source
from kvferry.connector.tiers.source import TierSource
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm, canonical_form_of
from kvferry.observe.metrics_listener import MetricsListener
from kvferry.observe.traces import TraceBuffer
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.files.tier import FileSettings, FileTier
from kvferry.tiers.format.decode import chunk_group
from kvferry.tiers.host.tier import HostTier
from kvferry.tiers.index import KeyTable
from kvferry.tiers.names import HOST, PEER, tier_name
from kvferry.tiers.objects.settings import ObjectSettings
from kvferry.tiers.objects.tier import ObjectTier
from kvferry.tiers.paths import chunk_name
from kvferry.tiers.storage_tier import StorageTier
from kvferry.tools.bench.rank_chunks import CHUNK_TOKENS
from kvferry.tools.bench.storage_chunks import bench_namespace
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache, ModelCache, StoredField
from kvferry.transport.control_client import ControlClient
from kvferry.transport.control_server import ControlServer
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Facts, PeerInfo, RankCard
from kvferry.transport.offer import Offer, write_offer
from kvferry.transport.redeem import Grant, new_ticket
from kvferry.transport.security import random_keys

SLOW = (FileSettings.kind, tier_name(FileSettings.kind, 1), ObjectSettings.kind)
"""Names of the storage tiers, which are slower than host memory, the fastest first."""

_HOST = "127.0.0.1"
_INCARNATION = 1
_PATIENCE_SECONDS = 10.0
_WINDOW, _BLOCK_TOKENS = 1024, 128
_SPEEDS = dict(zip((PEER, HOST, *SLOW), (400_000, 900_000, 200_000, 150_000, 50_000), strict=True))
"""Speeds of loads from each place in tokens per second, for policies that use them."""


def model(name: str, kinds: Iterable[GroupKind]) -> ModelCache:
    """Return a model with one layer of each kind. The layers are as small as possible."""
    rows = tuple(StoredField(field, 2, 2, (("content", 16),)) for field in ("k", "v"))
    state = (StoredField("ssm", 4, 2, (("row", 8),)),)
    return ModelCache(
        name,
        tuple(
            LayerCache(
                kind, _WINDOW if kind is GroupKind.SLIDING else 0, state if kind is GroupKind.STATE else rows
            )
            for kind in kinds
        ),
    )


def chunks_of(of: ModelCache) -> CanonicalForm:
    """Return the format of a model's chunks."""
    return canonical_form_of(lay_out(of, _shape(of)), CHUNK_TOKENS)


def _shape(of: ModelCache) -> EngineShape:
    return EngineShape(1, (len(of.layers),), _BLOCK_TOKENS, "LBNHC", 2)


class KnownChunks:
    """Host memory and three storage tiers whose indexes list chunks that have no bytes.

    Attributes:
        host: host tier.
        behind: storage tiers, the fastest first.
    """

    def __init__(
        self, stack: ExitStack, folder: Path, canonical: CanonicalForm, keys: Sequence[Sequence[bytes]]
    ) -> None:
        """Create the tiers.

        Args:
            stack: exit stack that closes the tiers.
            folder: empty folder for the directories.
            canonical: format of the chunks.
            keys: keys of the chunks in each tier, host memory first. The last byte of a key is the number of
                its KV cache group.

        Raises:
            TransferError: a tier does not list all of its chunks.
        """
        sizes, table = [group.chunk_bytes for group in canonical.groups], KeyTable()
        self.host = HostTier(
            2 * max(sizes) * len(keys[0]) + (64 << 20), sizes, EVICTION_POLICIES["lru"], table
        )
        for key in keys[0]:
            if (slot := self.host.reserve(key, key[-1])) is not None:
                self.host.commit(slot)
        spaces = bench_namespace(chunk_group(canonical.groups[0], CHUNK_TOKENS))
        self.behind: list[TierQueue] = []
        for name, of in zip(SLOW, keys[1:], strict=True):
            root = folder / name
            root.mkdir()
            if name == ObjectSettings.kind:
                _touch(root, spaces.digest, of)
                store: StorageTier = ObjectTier(root.as_uri(), spaces, table=table)
            else:
                store = FileTier(root, spaces, table=table)
                _touch(root, spaces.digest, of)
                store.refresh()
            queue = TierQueue(store, name)
            stack.callback(queue.close, _PATIENCE_SECONDS)
            self.behind.append(queue)
            if not store.contains(of).all():
                raise TransferError(f"{root} does not show all {len(of)} chunks; does somebody else use it?")


def _touch(root: Path, digest: bytes, keys: Iterable[bytes]) -> None:
    for bucket in range(256):
        (root / chunk_name(digest, bytes((bucket,)))).parent.mkdir(parents=True, exist_ok=True)
    for key in keys:
        (root / chunk_name(digest, key)).touch()


class AskingScheduler:
    """The scheduler side of one engine's connector.

    Attributes:
        cache: cache of chunks in the tiers.
        sources: sources of KV: the peer, and the tiers.
        admission: chooser of the source for each request.
    """

    def __init__(
        self, stack: ExitStack, of: ModelCache, kept: KnownChunks, policy: Literal["weight", "cost"]
    ) -> None:
        """Create the parts, start their threads, and complete the handshake with the peer.

        Args:
            stack: exit stack that stops the threads.
            of: KV cache of the model.
            kept: tiers with the model's chunks.
            policy: policy for choosing a source, ``weight`` or ``cost``.

        Raises:
            TransferError: the peer does not answer.
        """
        ranks, adapters = lay_out(of, _shape(of)), Adapters()
        self._prompts = Prompts(canonical := chunks_of(of), adapters)
        self.cache = ChunkCache(kept.host, _no_memory, canonical.groups, kept.behind)
        groups = tuple(
            CacheGroup(kind=layer.kind, attention_span=0, block_tokens=_BLOCK_TOKENS) for layer in of.layers
        )
        config, pool = ConnectorConfig(), NoBlocks()
        loads = RunningLoads(
            groups,
            workers=1,
            pool=pool,
            timeout_seconds=config.load_timeout_seconds,
            clock=time.monotonic,
        )
        events = EventStream(MetricsListener(), TraceBuffer(100))
        speeds = _measured_speeds()
        tiers = TierSource(
            self.cache,
            self._prompts,
            ranks[0].groups,
            canonical,
            events,
            workers=1,
            most_loads=config.tier_loads,
            speeds=speeds if policy == "cost" else None,
        )
        card = RankCard(ranks[0], b"", 4096, 64, _INCARNATION)
        theirs, ours = (Facts(name, _INCARNATION, "kvferry bench", {}) for name in ("peer", "engine"))
        keys = random_keys()
        server = stack.enter_context(closing(ControlServer(_HOST, 0, PeerInfo(theirs, (card,)), keys)))
        client = stack.enter_context(closing(ControlClient(ours, lambda _: None, keys)))
        self._tickets, self._address, self._groups = server.tickets, (_HOST, server.port), ranks[0].groups
        self._peers = PeerSource(
            client,
            ranks=ranks,
            loads=loads,
            events=events,
            timeout_seconds=config.load_timeout_seconds,
            most_held=1,
            turns=TurnFinder(client, dict, TurnNames(adapters)),
            adapters=adapters,
            idle=lambda: False,
        )
        self.sources: tuple[Source, ...] = self._peers, tiers
        self.admission = Admission(
            groups,
            loads=loads,
            parts=PartBlocks(ranks[0].groups, pool),
            headroom=Headroom(),
            attempts=config.attempts,
            sources=self.sources,
            chooser=BidChooser(policy, speeds, _PATIENCE_SECONDS),
            events=events,
        )
        ends = time.monotonic() + _PATIENCE_SECONDS
        while not isinstance(client.look_up(self._address, _INCARNATION), PeerInfo):
            if time.monotonic() > ends:
                raise TransferError(f"a peer in this process does not answer at {_HOST}:{server.port}")
            time.sleep(0.001)

    def request(self, name: str, tokens: Sequence[int], offered: int) -> Any:
        """Return a request with the peer's offer of a prefix.

        Args:
            name: id of the request.
            tokens: token ids of the prompt.
            offered: number of tokens that the peer offers.
        """
        one, ticket = PlainRequest(request_id=name, prompt_token_ids=tokens), new_ticket()
        grant = Grant.of(LeaseWord(0, 1, 1), offered, [[1] for _ in self._groups])
        self._tickets.publish(ticket, name, offered, content_of(one, offered, Adapters()), grant)
        one.kv_transfer_params = write_offer(Offer("peer", *self._address, ticket.hex(), offered, 0))
        return one

    def wait_redeemed(self, one: Any) -> None:
        """Wait until the peer has answered the redemption of a request's ticket.

        Raises:
            TransferError: the peer does not answer.
        """
        ends = time.monotonic() + _PATIENCE_SECONDS
        while any(bid.looking for bid in self._peers.ask(one, 0).bids):
            if time.monotonic() > ends:
                raise TransferError("a peer in this process does not redeem its own ticket")

    def finished(self, name: str) -> None:
        """End the request with this id."""
        self.admission.finished(name)
        self._prompts.remove(name)


def _measured_speeds() -> Speeds:
    """Return speeds with measurements for all places, as in a connector after some loads."""
    speeds = Speeds(lambda: 0.0)
    speeds.record_computation(10_000, 1.0)
    for place, rate in _SPEEDS.items():
        speeds.record_load([PlaceTokens(place, rate)], 1.0)
    return speeds


def _no_memory(offset: int, size: int) -> NoReturn:
    raise NotImplementedError("chunks that are only looked for have no bytes")
