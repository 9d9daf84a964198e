"""The decode side, without the engine: one rank's cache, its transfers, handshakes with producers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from kvferry.bench.content import check, fill
from kvferry.bench.engines import Engine
from kvferry.bench.link import Producer
from kvferry.bench.producer import CONTENT
from kvferry.bench.steps import Steps, Wanted
from kvferry.errors import TransferError
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Span
from kvferry.planning.strategy import Strategy
from kvferry.planning.template import build_templates
from kvferry.transport.control_client import ControlClient
from kvferry.transport.handshake import PeerInfo, Pending, Unusable
from kvferry.transport.lease import LeaseWord, LeaseWords, new_incarnation
from kvferry.transport.messages import Facts, RankCard
from kvferry.transport.settings import TransferSettings
from kvferry.transport.transfers import Transfers

_HANDSHAKE_SECONDS = 10.0
_LEASE_SLOTS = 1


class Reader:
    """A rank that reads from engines of a producer process; a context manager that ends its threads.

    Attributes:
        engine: whose rank, with the block tables to read into.
        producer: the other process.
        bytes: useful bytes of the engine's request on this rank.
        cache: where blocks land.
        cards: the ranks of every engine it reads from, as they introduced themselves.
        steps: what hooks do.
    """

    def __init__(
        self,
        engine: Engine,
        producer: Producer,
        peers: Sequence[int] = (0,),
        rank: int = 0,
        settings: TransferSettings | None = None,
    ) -> None:
        """Start everything; returns when all know each other.

        Args:
            engine: what is read into.
            producer: the process that holds what is read.
            peers: numbers of its engines.
            rank: which rank of `engine` this is.
            settings: how bytes move.

        Raises:
            ConfigError: memory or NIXL cannot be had.
            TransferError: the other process cannot be read from.
        """
        self.engine, self.producer, self.bytes = engine, producer, engine.rank_bytes(rank)
        self._leases, self._tickets = 0, dict[str, bytes]()
        with ExitStack() as stack:
            self.cache = engine.allocated(rank)
            self._expected = engine.allocated(rank)
            fill(self._expected, engine)
            words = LeaseWords(new_incarnation(), _LEASE_SLOTS)
            name = f"bench-reader/{engine.name}/{words.incarnation:x}"
            transfers = Transfers(
                name, self.cache.geometry, words, replace(settings or TransferSettings(), keys=producer.keys)
            )
            stack.callback(transfers.close)
            self.steps = Steps(transfers)
            facts = Facts("bench-reader", new_incarnation(), "kvferry bench", {})
            self._client = ControlClient(facts, self._fits, producer.keys)
            stack.callback(self._client.close)
            self.cards: Mapping[int, tuple[RankCard, ...]] = {peer: self._known(peer) for peer in peers}
            for peer, cards in self.cards.items():
                transfers.connect(_name(peer), cards)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache's memory, and as much memory with what it must hold after a move; uint8."""
        return self.cache.buffer, self._expected.buffer

    def wanted(
        self,
        span: Span,
        src_tables: Sequence[Int64s],
        dst_tables: Sequence[Int64s],
        peer: int = 0,
        strategy: Strategy | None = None,
    ) -> Wanted:
        """A load for which the producer has granted a lease."""
        self._leases += 1
        key = f"{self.engine.name}-{self._leases}"
        tables = [table.tolist() for table in src_tables], [table.tolist() for table in dst_tables]
        return Wanted(key, _name(peer), span, *tables, self.granted(key, peer), strategy)

    def granted(self, key: str, peer: int = 0) -> LeaseWord:
        """Have the producer take a lease, and claim it; return its word.

        Raises:
            TransferError: the producer refuses, or is silent.
        """
        ticket = self._tickets[key] = self.producer.grant(peer, key)
        number = self._client.redeem(self.producer.address(peer), ticket, 1, CONTENT)
        while isinstance(answer := self._client.redemption(number, _HANDSHAKE_SECONDS), Pending):
            self.producer.check()
        self._client.end_redemption(number)
        if isinstance(answer, Unusable):
            raise TransferError(f"the producer process does not redeem a ticket: {answer.reason}")
        return answer.grant.word(answer.incarnation)

    def acknowledge(self, key: str, peer: int = 0) -> None:
        """Tell the producer that its blocks are no longer needed."""
        self._client.release(self.producer.address(peer), self._tickets.pop(key))

    def wipe(self) -> None:
        """Forget what was read; not by torch, whose threads would spin on into what is timed."""
        self.cache.buffer.numpy().fill(0)

    def check(self) -> None:
        """Raise TransferError unless the memory is what it must be after the engine's request was read."""
        check(self.cache, self._expected)

    def _fits(self, cards: tuple[RankCard, ...]) -> None:
        build_templates([card.geometry for card in cards], self.cache.geometry)

    def _known(self, peer: int) -> tuple[RankCard, ...]:
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
