"""What is known of peers and how it is learned: the handshake, without a socket.

    (unknown) ─start→ LOOKING ─ranks arrive→ KNOWN
                         └─refused, silent or malformed→ REFUSED ─after a while→ (unknown)

The engine's thread uses `known`, `start` and `forget`; the thread that has the sockets uses the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import Incompatible, KVFerryError, ProtocolError
from kvferry.transport.messages import (
    PROTOCOL,
    Accepted,
    AskRanks,
    Facts,
    Hello,
    RankCard,
    Ranks,
    Refused,
    Reply,
    compare,
    decode_reply,
)

logger = logging.getLogger(__name__)

REFUSAL_SECONDS = 10.0
"""How long a refusal stands before the peer is asked again."""

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Looking:
    """The handshake is under way."""


@dataclass(frozen=True, slots=True)
class Known:
    """The peer can be read from."""

    facts: Facts
    ranks: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class NotUsable:
    """It cannot; why, in words."""

    reason: str


Answer: TypeAlias = Looking | Known | NotUsable


@dataclass(slots=True)
class _UnderWay:
    deadline: float
    facts: Facts | None = None  # the peer's, once it has accepted us


class Handshakes:
    """Handshakes with peers, each with a deadline of its own."""

    def __init__(
        self,
        facts: Facts,
        check: Callable[[tuple[RankCard, ...]], None],
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody is known yet.

        Args:
            facts: who we are.
            check: raises Incompatible for ranks from which we cannot read.
            patience_seconds: when a silent peer is given up.
            clock: seconds.
        """
        self._facts, self._check, self._patience_seconds, self._clock = facts, check, patience_seconds, clock
        self._answers: dict[Address, Answer] = {}
        self._refused_at: dict[Address, float] = {}
        self._other_runs: set[tuple[Address, int, int]] = set()
        self._under_way: dict[Address, _UnderWay] = {}

    # -- the engine's thread ------------------------------------------------------------------------------

    def known(self, address: Address, incarnation: int) -> Answer | None:
        """What is known of the peer at `address`, whose tickets say `incarnation`; None if it must be asked.

        A peer known by another incarnation may have been restarted: it is asked anew, once. If the answer
        is the same, it is the ticket that is of another run, and the caller sees that from the facts.
        """
        answer = self._answers.get(address)
        if isinstance(answer, NotUsable) and self._refusal_is_over(address):
            return None
        if isinstance(answer, Known) and answer.facts.incarnation != incarnation:
            mismatch = (address, answer.facts.incarnation, incarnation)
            if mismatch not in self._other_runs:
                self._other_runs.add(mismatch)
                return None
        return answer

    def start(self, address: Address) -> Looking:
        """The peer is about to be asked."""
        answer = self._answers[address] = Looking()
        return answer

    def forget(self, address: Address) -> None:
        """Ask this peer anew next time."""
        self._answers.pop(address, None)

    # -- the thread that has the sockets ------------------------------------------------------------------

    @property
    def deadlines(self) -> list[float]:
        """Of the handshakes under way, by the clock."""
        return [handshake.deadline for handshake in self._under_way.values()]

    def open(self, address: Address) -> Hello:
        """What to say first; the peer's time begins."""
        self._under_way[address] = _UnderWay(self._clock() + self._patience_seconds)
        return Hello(PROTOCOL, self._facts)

    def hear(self, address: Address, answer: bytes) -> AskRanks | None:
        """Take a peer's answer; what to say next, if anything."""
        handshake = self._under_way.get(address)
        if handshake is None:
            return None  # nothing was asked, or it came too late
        try:
            return self._take(address, handshake, decode_reply(answer))
        except KVFerryError as error:
            self.refuse(address, str(error))
        except Exception as error:  # a bad peer costs that peer, nothing else
            logger.exception("control channel")
            self.refuse(address, f"its answer cannot be used: {error}")
        return None

    def refuse(self, address: Address, reason: str) -> None:
        """This peer is of no use for a while."""
        logger.warning("peer at %s:%d cannot be used: %s", *address, reason)
        self._under_way.pop(address, None)
        self._refused_at[address] = self._clock()
        self._answers[address] = NotUsable(reason)

    def give_up_on_silent(self) -> None:
        """Refuse peers whose time is over."""
        now = self._clock()
        for address in [a for a, handshake in self._under_way.items() if now >= handshake.deadline]:
            self.refuse(address, f"no answer within {self._patience_seconds:g} s; is it up, and reachable?")

    def is_unknown(self, address: Address) -> bool:
        """Whether nothing is known of a peer, nor asked; forgets a refusal that no longer stands."""
        answer = self._answers.get(address)
        if isinstance(answer, NotUsable) and self._refusal_is_over(address):
            self._answers.pop(address, None)
            self._refused_at.pop(address, None)
            return True
        return answer is None and address not in self._under_way

    def _take(self, address: Address, handshake: _UnderWay, reply: Reply) -> AskRanks | None:
        if isinstance(reply, Refused):
            self.refuse(address, "; ".join(reply.differences) or "it gave no reason")
        elif isinstance(reply, Accepted):
            if found := compare(reply.facts.must_agree, self._facts.must_agree):
                raise Incompatible(found)
            handshake.facts = reply.facts
            return AskRanks(PROTOCOL, self._facts)
        elif isinstance(reply, Ranks):
            self._learn(address, handshake.facts, tuple(reply.ranks))
        return None

    def _learn(self, address: Address, facts: Facts | None, ranks: tuple[RankCard, ...]) -> None:
        if facts is None or not ranks:
            raise ProtocolError("ranks came before the peer was accepted, or there are none")
        self._check(ranks)
        del self._under_way[address]
        self._answers[address] = Known(facts, ranks)
        logger.info(
            "peer %s (%s) at %s:%d: %d rank(s) known", facts.engine_id, facts.software, *address, len(ranks)
        )

    def _refusal_is_over(self, address: Address) -> bool:
        return self._clock() - self._refused_at.get(address, -REFUSAL_SECONDS) > REFUSAL_SECONDS
