"""The reading side without a model: one rank's KV cache, its transfers, and handshakes with a producer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch

from kvferry.common.errors import TransferError
from kvferry.connector import Bid, Load, LoadPart, Loads
from kvferry.memory import finish_stream
from kvferry.planning import Int64s, LoadSpan, Strategy, build_templates
from kvferry.tools.measuring.producer_process import CONTENT, ProducerProcess, WaitLimit
from kvferry.tools.measuring.simulated import SimulatedEngine, check_memory, fill_blocks
from kvferry.transport import (
    ControlClient,
    Facts,
    LeaseWord,
    LeaseWords,
    LoadFigures,
    PeerInfo,
    Pending,
    RankCard,
    ReadOrder,
    Redemption,
    Report,
    Transfers,
    TransferSettings,
    Unusable,
    new_incarnation,
)

# So long that a busy machine does not end a measurement.
_LOAD_SECONDS = 60.0
# The end of a load is noticed only in an engine step.
STEP_SECONDS = 1e-3
_HANDSHAKE_SECONDS = 10.0
# Nobody reads from a reader.
_LEASE_SLOTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The scheduler's request to a worker to load a prompt's KV from a peer."""

    key: str  # name of the load and of its lease, unique in this engine
    peer: str
    span: LoadSpan
    # `src_tables`, `dst_tables`: block ids of each KV cache group, on the peer and on this rank.
    src_tables: Sequence[list[int]]
    dst_tables: Sequence[list[int]]
    lease: LeaseWord
    strategy: Strategy | None = None  # transfer strategy to use; None for the cheapest


@dataclass(slots=True)
class StepOutcome:
    """The loads that ended, as seen by a worker in one engine step."""

    # For each load that the worker reports to the scheduler, the reason why it failed, or None if it
    # succeeded.
    failures: dict[str, str | None] = field(default_factory=dict)
    # Reports of the loads that the lanes have finished. If a load passed its deadline, `failures` of an
    # earlier step already reported it as failed.
    results: dict[str, Report] = field(default_factory=dict)


def as_arrays(tables: Sequence[list[int]]) -> tuple[Int64s, ...]:
    """Convert block tables from lists of block ids to int64 arrays."""
    return tuple(np.array(table, np.int64) for table in tables)


class Reader:
    """A rank that reads KV from the engines of a producer process. Leaving its context ends the threads.

    Attributes:
        bytes: bytes of the request's KV on this rank, without padding.
        cache: KV cache of this rank, which loads overwrite.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        producer: ProducerProcess,
        peers: Sequence[int] = (0,),
        rank: int = 0,
        settings: TransferSettings | None = None,
    ) -> None:
        """Allocate the KV cache, start the threads, and shake hands with the producer's engines.

        Args:
            peers: indices, in the producer process, of the engines to read from.
        """
        self.engine, self.producer, self.bytes = engine, producer, engine.rank_bytes(rank)
        self._leases, self._claims = 0, dict[str, Redemption]()
        with ExitStack() as stack:
            self.cache = engine.allocated(rank)
            # Computed, not read: so it needs no transfer to be right.
            self._expected = replace(engine, device="cpu").allocated(rank)
            fill_blocks(self._expected, engine)
            words = LeaseWords(new_incarnation(), _LEASE_SLOTS)
            name = f"bench-reader/{engine.name}/{words.incarnation:x}"
            settings = replace(settings or TransferSettings(), keys=producer.keys)
            self._transfers = Transfers(name, self.cache.geometry, words, settings)
            stack.callback(self._transfers.close)
            self._loads = Loads(time.monotonic)
            facts = Facts("bench-reader", new_incarnation(), "kvferry bench", {})
            self._client = ControlClient(facts, self._check_compatible, producer.keys)
            stack.callback(self._client.close)
            self.cards: Mapping[int, tuple[RankCard, ...]] = {peer: self._handshake(peer) for peer in peers}
            for peer, cards in self.cards.items():
                self._transfers.connect(_name(peer), cards)
            # Everything is started. Until here, an error ends what was.
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of the KV cache, and the expected bytes after a read, both uint8 of shape (bytes,)."""
        return self.cache.buffer, self._expected.buffer

    def step(self, requests: Sequence[LoadRequest] = ()) -> StepOutcome:
        """Begin new loads, as in a step of a worker, and return those that ended or passed their deadline."""
        for load in requests:
            # In the step, because the block ids are known only then.
            source, tables = as_arrays(load.src_tables), as_arrays(load.dst_tables)
            self._loads.begin(
                Load(
                    key=load.key,
                    request_id=load.key,
                    attempt=load.key,
                    loads=1,
                    bid=Bid(load.peer, ()),
                    span=load.span,
                    tables=tables,
                    timeout_seconds=_LOAD_SECONDS,
                    began=0.0,
                )
            )
            order = ReadOrder(load.key, load.peer, load.span, source, tables, load.lease, load.strategy)
            self._loads.add(LoadPart(load.key, order, last=True))
            self._transfers.submit(order)
        stepped = StepOutcome()
        for key, report in self._transfers.results():
            stepped.results[key] = report
            self._loads.on_part_ended(key, report)
        for one in self._loads.settle():
            if one.report is not None:
                stepped.failures[one.load.key] = one.report.failure
        return stepped

    def load_request(
        self,
        span: LoadSpan,
        src_tables: Sequence[Int64s],
        dst_tables: Sequence[Int64s],
        peer: int = 0,
        strategy: Strategy | None = None,
    ) -> LoadRequest:
        """Have an engine lease its blocks to this rank, and return a request to load KV under the lease.

        Args:
            src_tables, dst_tables: block tables there and on this rank, each int64 of shape (blocks,).
        """
        self._leases += 1
        key = f"{self.engine.name}-{self._leases}"
        return LoadRequest(
            key=key,
            peer=_name(peer),
            span=span,
            src_tables=[table.tolist() for table in src_tables],
            dst_tables=[table.tolist() for table in dst_tables],
            lease=self.claim_lease(key, peer),
            strategy=strategy,
        )

    def load(
        self,
        source: SimulatedEngine,
        peer: int = 0,
        strategy: Strategy | None = None,
        poll_seconds: float = STEP_SECONDS,
    ) -> tuple[Report, float]:
        """Load a request's KV, and return its report and the seconds until the request may use it.

        Raises:
            TransferError: the load failed, or the producer process died.
        """
        # Before the time starts: a scheduler has the lease when the block ids are known.
        request = self.load_request(source.span, source.tables, self.engine.tables, peer, strategy)
        limit = WaitLimit(self.producer.check)
        started = time.perf_counter()
        outcome = self.step([request])
        while request.key not in outcome.failures:
            limit.check()
            time.sleep(poll_seconds)
            outcome = self.step()
        self.acknowledge(request.key)
        seconds = time.perf_counter() - started
        if failure := outcome.failures[request.key]:
            raise TransferError(f"kvferry could not read from the producer process: {failure}")
        return outcome.results[request.key], seconds

    def figures(self, source: SimulatedEngine, peer: int = 0) -> LoadFigures:
        """Load a request's KV, and return how kvferry did it. Raises as `load`."""
        return self.load(source, peer)[0].figures

    def claim_lease(self, key: str, peer: int = 0) -> LeaseWord:
        """Make an engine grant a lease, claim it, and return its lease word."""
        ticket = self.producer.grant(peer, key)
        claim = self._client.redeem(self.producer.address(peer), ticket, 1, CONTENT)
        while isinstance(answer := self._client.answer(claim, _HANDSHAKE_SECONDS), Pending):
            self.producer.check()
        if isinstance(answer, Unusable):
            self._client.end(claim)
            raise TransferError(f"the producer process does not redeem a ticket: {answer.reason}")
        self._claims[key] = claim
        return answer.grant.word

    def acknowledge(self, key: str) -> None:
        self._client.end(self._claims.pop(key))

    def clear(self) -> None:
        if self.cache.buffer.is_cuda:
            self.cache.buffer.zero_()
            finish_stream(self.cache.buffer.device)
        else:
            # Not torch, because its threads would keep spinning during the timed part.
            self.cache.buffer.numpy().fill(0)

    def check(self) -> None:
        check_memory(self.cache, self._expected)

    def _check_compatible(self, cards: tuple[RankCard, ...]) -> None:
        build_templates([card.geometry for card in cards], self.cache.geometry)

    def _handshake(self, peer: int) -> tuple[RankCard, ...]:
        address, incarnation = self.producer.address(peer), self.producer.listening.incarnation
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        while time.monotonic() < deadline:
            answer = self._client.look_up(address, incarnation)
            if isinstance(answer, PeerInfo):
                return answer.ranks
            if isinstance(answer, Unusable):
                raise TransferError(f"the producer process cannot be used: {answer.reason}")
            self.producer.check()
            time.sleep(0.005)
        raise TransferError(f"the producer process did not shake hands within {_HANDSHAKE_SECONDS:g} s")


def _name(peer: int) -> str:
    return f"producer {peer}"
