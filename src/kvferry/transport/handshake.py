"""Handshakes with peers and their results, without sockets.

    (unknown) ─start→ LOOKING ─ranks arrive→ KNOWN
                         └─refused, silent or malformed→ REFUSED ─after a while→ (unknown)

Requests name addresses, so a client can make the engine contact any number of them. The number of concurrent
handshakes is therefore limited, and while there are many, silent peers time out early. The number of
remembered peers is limited too.

The engine's thread uses `status`, `start` and `forget`; the thread that has the sockets uses the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvferry.errors import Incompatible, KVFerryError, ProtocolError
from kvferry.limited_log import LimitedLog
from kvferry.terminal import shown
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
    compare_facts,
    decode_reply,
)

logger = logging.getLogger(__name__)

REFUSAL_SECONDS = 10.0
"""Time for which a refused peer is not asked again."""

REFRESH_SECONDS = 2.0
"""Minimum time between handshakes that are caused by tickets of another incarnation."""

MAX_HANDSHAKES = 64
"""Maximum number of concurrent handshakes."""

HURRY_HANDSHAKES = 32
"""Number of concurrent handshakes from which silent peers time out early."""

HURRY_SECONDS = 0.5
"""The early timeout of a silent peer."""

MAX_REMEMBERED = 1024
"""Maximum number of remembered refusals, and of known peers; the oldest are forgotten."""

_REASON_CHARACTERS = 2000

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pending:
    """The handshake is under way."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The peer can be read from."""

    facts: Facts
    ranks: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class Unusable:
    """The peer cannot be read from; the reason is a sentence."""

    reason: str


PeerStatus: TypeAlias = Pending | PeerInfo | Unusable


@dataclass(slots=True)
class _Handshake:
    began: float
    facts: Facts | None = None  # the peer's, once it has accepted us


class Handshakes:
    """Handshakes with peers, each with a deadline of its own."""

    def __init__(
        self,
        facts: Facts,
        check: Callable[[Address, tuple[RankCard, ...]], tuple[RankCard, ...]],
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the registry without peers.

        Args:
            facts: facts about this engine.
            check: returns a peer's ranks with addresses to dial; raises Incompatible for ranks that this
                engine cannot read.
            patience_seconds: time for a peer to answer.
            clock: seconds.
        """
        self._facts, self._check, self._patience_seconds, self._clock = facts, check, patience_seconds, clock
        self._answers: dict[Address, PeerStatus] = {}
        self._refused_at: dict[Address, float] = {}
        self._asked_anew: dict[Address, float] = {}
        self._looking: dict[Address, None] = {}
        self._known_since: dict[Address, float] = {}
        self._closable: list[Address] = []
        self._log = LimitedLog(logger, clock=clock)
        self._running: dict[Address, _Handshake] = {}

    # -- the engine's thread ------------------------------------------------------------------------------

    def status(self, address: Address, incarnation: int | None = None) -> PeerStatus | None:
        """Return the status of the peer at `address`; None if a handshake is needed.

        A peer known by another incarnation than `incarnation` may have been restarted, so a handshake is
        needed unless one has just been done. If the peer reports the same incarnation again, the grant is
        stale; the caller can tell from the facts.
        """
        answer = self._answers.get(address)
        if isinstance(answer, Unusable) and self._refusal_is_over(address):
            return None
        if isinstance(answer, PeerInfo) and incarnation not in (None, answer.facts.incarnation):
            now = self._clock()
            if now - self._asked_anew.get(address, -REFRESH_SECONDS) >= REFRESH_SECONDS:
                _put(self._asked_anew, address, now)
                return None
        return answer

    @property
    def is_full(self) -> bool:
        """True while the maximum number of handshakes is under way."""
        return len(self._looking) >= MAX_HANDSHAKES

    def start(self, address: Address) -> Pending:
        """Record that a handshake is about to start."""
        self._looking[address] = None
        answer = self._answers[address] = Pending()
        return answer

    def forget(self, address: Address) -> None:
        """Forget what is known of a peer, so that its next use starts a handshake."""
        self._looking.pop(address, None)
        self._answers.pop(address, None)

    # -- the thread that has the sockets ------------------------------------------------------------------

    @property
    def deadlines(self) -> list[float]:
        """Deadlines of the handshakes under way, in seconds of the clock."""
        return [one.began + self._patience(one) for one in list(self._running.values())]

    def open(self, address: Address) -> Hello:
        """Return the first message to a peer and start its timeout."""
        self._running[address] = _Handshake(self._clock())
        return Hello(PROTOCOL, self._facts)

    def handle_reply(self, address: Address, answer: bytes) -> AskRanks | None:
        """Process a peer's reply; return the next message to it, if any."""
        handshake = self._running.get(address)
        if handshake is None:
            return None  # nothing was asked, or it came too late
        try:
            return self._take(address, handshake, decode_reply(answer))
        except KVFerryError as error:
            self.refuse(address, str(error))
        except Exception as error:  # noqa: BLE001 - said in full; a bad peer costs that peer, nothing else
            self._log.say(type(error).__name__, "control channel: an unexpected error", error)
            self.refuse(address, f"its answer cannot be used: {error}")
        return None

    def refuse(self, address: Address, reason: str) -> None:
        """Refuse a peer for REFUSAL_SECONDS, and log why."""
        reason = shown(reason, _REASON_CHARACTERS)
        host, port = address
        self._log.say(f"{address}", f"peer at {shown(host)}:{port} cannot be used: {reason}")
        self._running.pop(address, None)
        self._looking.pop(address, None)
        self._answers[address] = Unusable(reason)
        if (oldest := _put(self._refused_at, address, self._clock())) is not None and isinstance(
            self._answers.get(oldest), Unusable
        ):
            self._answers.pop(oldest, None)
        self._closable.append(address)

    def pop_refused(self) -> list[Address]:
        """Return the peers that were refused since the last call."""
        refused, self._closable = self._closable, []
        return refused

    def refuse_silent(self) -> None:
        """Refuse peers whose deadline has passed."""
        now = self._clock()
        for address, handshake in list(self._running.items()):
            patience = self._patience(handshake)
            if now >= handshake.began + patience:
                self.refuse(
                    address,
                    f"no answer within {patience:g} s; is it up and reachable, and does it have the "
                    "same key?",
                )

    def is_refused(self, address: Address) -> bool:
        """Return whether a peer was asked and cannot be used."""
        return isinstance(self._answers.get(address), Unusable)

    def _patience(self, handshake: _Handshake) -> float:
        """Return the timeout for a reply: shorter for a silent peer while many handshakes are under way."""
        if handshake.facts is None and len(self._running) > HURRY_HANDSHAKES:
            return min(HURRY_SECONDS, self._patience_seconds)
        return self._patience_seconds

    def is_unknown(self, address: Address) -> bool:
        """Return whether a peer is unknown and no handshake with it is under way."""
        return self._answers.get(address) is None and address not in self._running

    def forget_refusals(self) -> None:
        """Forget refusals that have expired."""
        for address in [one for one in self._refused_at if self._refusal_is_over(one)]:
            del self._refused_at[address]
            if self.is_refused(address):
                self._answers.pop(address, None)

    def _take(self, address: Address, handshake: _Handshake, reply: Reply) -> AskRanks | None:
        if isinstance(reply, Refused):
            self.refuse(address, "; ".join(reply.differences) or "it gave no reason")
        elif isinstance(reply, Accepted):
            if found := compare_facts(reply.facts.must_agree, self._facts.must_agree):
                raise Incompatible(found)
            handshake.facts = reply.facts
            return AskRanks(PROTOCOL, self._facts)
        elif isinstance(reply, Ranks):
            self._learn(address, handshake.facts, tuple(reply.ranks))
        return None

    def _learn(self, address: Address, facts: Facts | None, ranks: tuple[RankCard, ...]) -> None:
        if facts is None or not ranks:
            raise ProtocolError(
                "the peer sent its ranks before its facts, or sent none; expected facts, then one rank "
                "or more"
            )
        ranks = self._check(address, ranks)
        del self._running[address]
        self._looking.pop(address, None)
        self._answers[address] = PeerInfo(facts, ranks)
        if (oldest := _put(self._known_since, address, self._clock())) is not None and isinstance(
            self._answers.get(oldest), PeerInfo
        ):
            self._answers.pop(oldest, None)
        logger.info(
            "peer %s (%s) at %s:%d: %d rank(s) known",
            shown(facts.engine_id),
            shown(facts.software),
            *address,
            len(ranks),
        )

    def _refusal_is_over(self, address: Address) -> bool:
        return self._clock() - self._refused_at.get(address, -REFUSAL_SECONDS) > REFUSAL_SECONDS


def _put(times: dict[Address, float], address: Address, now: float) -> Address | None:
    """Record the time for an address. If there are too many, forget the oldest and return its address."""
    times.pop(address, None)
    times[address] = now
    if len(times) <= MAX_REMEMBERED:
        return None
    oldest = next(iter(times))
    del times[oldest]
    return oldest
