"""The decode side, without the engine: a pool, its transfer thread, a real handshake with the producer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvferry.bench.link import Producer
from kvferry.bench.pool import Pool
from kvferry.bench.shapes import Shape
from kvferry.bench.steps import Steps, Wanted
from kvferry.errors import TransferError
from kvferry.planning.pieces import Int64s
from kvferry.planning.select import Span
from kvferry.planning.template import build_templates
from kvferry.transport.control_client import ControlClient, Known, NotUsable
from kvferry.transport.lease import LeaseWords, new_incarnation
from kvferry.transport.messages import Facts, RankCard
from kvferry.transport.thread import TransferThread

_HANDSHAKE_SECONDS = 10.0
_PEER = "producer"
_LEASE_SLOTS = 1


class Reader:
    """A rank that reads from a producer process it has started; a context manager that ends both.

    Attributes:
        pool: where pages land.
        producer: the other process.
        cards: its ranks, as it introduced itself.
        steps: what hooks do.
    """

    def __init__(self, shape: Shape, num_blocks: int, settings: Mapping[str, str]) -> None:
        """Start everything; returns when the two know each other.

        Args:
            shape, num_blocks: the blocks of each side, the null block among them.
            settings: environment variables for the producer's transport; ours are set already.

        Raises:
            ConfigError: memory or NIXL cannot be had.
            TransferError: the other process cannot start or cannot be read from.
        """
        self._leases = 0
        with ExitStack() as stack:
            self.producer = stack.enter_context(Producer(shape, num_blocks, settings))
            self.pool = Pool(shape, num_blocks)
            words = LeaseWords(new_incarnation(), _LEASE_SLOTS)
            thread = TransferThread(f"bench-reader/{words.incarnation:x}", self.pool.geometry, words)
            stack.callback(thread.close)
            self.steps = Steps(thread)
            self._client = ControlClient(
                Facts("bench-reader", new_incarnation(), "kvferry bench", {}), self._fits
            )
            stack.callback(self._client.close)
            self.cards = self._shake_hands()
            thread.connect(_PEER, self.cards)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wanted(self, tokens: int, src_table: Int64s, dst_table: Int64s) -> Wanted:
        """A load of the first `tokens` tokens, for which the producer has granted a lease."""
        self._leases += 1
        key = f"bench-{self._leases}"
        ticket = self.producer.grant(key)
        self._client.hold(self.producer.listening.address, key)
        span = Span(0, tokens, tokens + 1)
        return Wanted(key, _PEER, span, src_table.tolist(), dst_table.tolist(), ticket)

    def acknowledge(self, key: str) -> None:
        """Tell the producer that its blocks are no longer needed."""
        self._client.release(self.producer.listening.address, key)

    def _fits(self, cards: tuple[RankCard, ...]) -> None:
        build_templates([card.geometry for card in cards], self.pool.geometry)

    def _shake_hands(self) -> tuple[RankCard, ...]:
        listening = self.producer.listening
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        while time.monotonic() < deadline:
            answer = self._client.look_up(listening.address, listening.incarnation)
            if isinstance(answer, Known):
                return answer.ranks
            if isinstance(answer, NotUsable):
                raise TransferError(f"the producer process cannot be used: {answer.reason}")
            self.producer.check()
            time.sleep(0.005)
        raise TransferError(f"the producer process did not shake hands within {_HANDSHAKE_SECONDS:g} s")
