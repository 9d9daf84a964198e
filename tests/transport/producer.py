"""The other process: all ranks of a made-up engine that others read from.

`main` is given one end of a socket. For every `Produce` it receives it becomes that engine and answers with
its ranks' cards; in between it does what the methods of `ProducerRanks` do. It ends when the socket closes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transport.costs import TransferSettings
from kvferry.transport.lease import LeaseWords
from kvferry.transport.transfers import Transfers
from support.engines import EngineSpec, Family, ranks
from support.keys import KEYS
from support.oracle import fill
from support.unmapped import take_away
from transport.memory import place

SLOTS = 64


@dataclass(frozen=True)
class Produce:
    """What to be: an engine whose memory holds the sequence in `tables`, the rest noise.

    The noise of rank ``n`` has seed `seed` + ``n``; without `tables` it is all there is.
    """

    name: str
    spec: EngineSpec
    families: tuple[Family, ...]
    tables: tuple[np.ndarray, ...] | None
    seed: int
    incarnation: int
    settings: TransferSettings | None = None


class ProducerRanks:
    """All ranks of what was ordered."""

    def __init__(self, order: Produce) -> None:
        self._memories, self._threads = [], []
        self.cards = []
        for number, made_up in enumerate(ranks(order.spec, order.families)):
            rank, memory = place(made_up, order.seed + number)
            if order.tables is not None:
                fill(rank, order.tables, memory)
            words = LeaseWords(order.incarnation + number, SLOTS)
            settings = replace(order.settings or TransferSettings(), keys=KEYS)
            thread = Transfers(f"{order.name}/{number}", rank, words, settings)
            self._memories.append(memory)
            self._threads.append(thread)
            self.cards.append(thread.card)

    def end(self, slots: list[int]) -> None:
        for thread in self._threads:
            thread.words.end(slots)

    def zero(self) -> None:
        for memory in self._memories:
            memory.bytes[:] = 0

    def sleep(self) -> None:
        self.close()
        for memory in self._memories:
            take_away(memory.address, memory.bytes.nbytes)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def main(connection: Connection[Any, Any]) -> None:
    produced: ProducerRanks | None = None
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        if isinstance(order, Produce):
            if produced is not None:
                produced.close()
            produced = ProducerRanks(order)
            connection.send(produced.cards)
        else:
            verb, *arguments = order
            getattr(produced, verb)(*arguments)
            connection.send(verb)
