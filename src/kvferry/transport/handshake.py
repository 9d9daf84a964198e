"""The state of the handshakes with peers. This module opens no sockets.

    (unknown) ─start→ Pending ─the reply arrives→ PeerInfo
                         └─refused, silent or malformed→ Unusable ─after a while→ (unknown)

Requests name the addresses of peers, so a client can make the engine contact any number of addresses.
Therefore the number of concurrent handshakes is limited. While there are many, silent peers time out early.
The number of remembered peers is limited too.

The engine's thread uses `status`, `is_full`, `start` and `forget`. The thread with the sockets uses the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from kvferry.common.errors import Incompatible, KVFerryError, ProtocolError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.common.units import counted
from kvferry.transport.messages import (
    PROTOCOL,
    Facts,
    Hello,
    PeerInfo,
    RankCard,
    Refused,
    Reply,
    compare_facts,
    decode_reply,
)

logger = logging.getLogger(__name__)

REFUSAL_SECONDS = 10.0  # seconds for which a refused peer is not contacted again

# The same for a peer to which no connection can be opened. It may be back soon, and asking takes no time.
GONE_SECONDS = 1.0

GONE = "no connection can be opened to it; has its engine ended, or is its host unreachable?"

# Minimum seconds between handshakes with a known peer whose tickets name another run of its engine.
REFRESH_SECONDS = 2.0

MAX_HANDSHAKES = 64  # maximum number of concurrent handshakes

HURRY_HANDSHAKES = 32  # number of concurrent handshakes above which silent peers time out early

# Timeout of a silent peer in seconds, while more than `HURRY_HANDSHAKES` handshakes are under way.
HURRY_SECONDS = 0.5

# Maximum number of remembered refusals, and maximum number of known peers; the oldest are forgotten.
MAX_REMEMBERED = 1024

_REASON_CHARACTERS = 2000

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pending:
    """Status of a peer: the handshake with it is under way."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Status of a peer: this engine cannot read from it. If `gone`, it is unreachable or silent."""

    reason: str
    gone: bool = False


PeerStatus: TypeAlias = Pending | PeerInfo | Unusable


@dataclass(slots=True)
class _Handshake:
    """A handshake that is under way, with a peer that is `connected` if it has this engine's key."""

    began: float
    connected: bool = False


class Handshakes:
    """The handshakes with all peers, and the status of each peer. Each handshake has its own deadline.

    `soonest` is the time of the next deadline, as of the last call of `refuse_silent`; may be infinite.
    """

    def __init__(
        self,
        facts: Facts,
        check: Callable[[Address, tuple[RankCard, ...]], tuple[RankCard, ...]],
        patience_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Start empty. `check` returns ranks with IP addresses for host names, or raises Incompatible."""
        self._hello, self._check = Hello(PROTOCOL, facts), check
        self._patience_seconds, self._clock = patience_seconds, clock
        self._answers: dict[Address, PeerStatus] = {}
        self._refused_until: dict[Address, float] = {}
        self._asked_anew: dict[Address, float] = {}
        self._known_since: dict[Address, float] = {}
        self._closable: list[Address] = []
        self.soonest = math.inf
        self._log = LimitedLog(logger, clock=clock)
        self._running: dict[Address, _Handshake] = {}

    # -- the engine's thread ------------------------------------------------------------------------------

    def status(self, address: Address, incarnation: int | None = None) -> PeerStatus | None:
        """Return the status of a peer; None if the caller must start a new handshake with it.

        That is so if the peer is unknown, became Unusable some time ago, or may have restarted, because
        `incarnation` is not the one that it reported. In the last case, None is returned at most once per
        `REFRESH_SECONDS`, and the old PeerInfo otherwise, whose incarnation the caller must compare.
        """
        answer = self._answers.get(address)
        if isinstance(answer, Unusable) and self._refusal_is_over(address):
            return None
        if isinstance(answer, PeerInfo) and incarnation not in (None, answer.facts.incarnation):
            now = self._clock()
            if now - self._asked_anew.get(address, -REFRESH_SECONDS) >= REFRESH_SECONDS:
                _store_limited(self._asked_anew, address, now)
                return None
        return answer

    @property
    def is_full(self) -> bool:
        return sum(isinstance(one, Pending) for one in list(self._answers.values())) >= MAX_HANDSHAKES

    def start(self, address: Address) -> Pending:
        """Set the status of a peer to Pending. Then `open` must be called, and its message sent."""
        answer = self._answers[address] = Pending()
        return answer

    def forget(self, address: Address) -> None:
        self._answers.pop(address, None)

    # -- the thread that has the sockets ------------------------------------------------------------------

    def open(self, address: Address, *, again: bool = False) -> Hello:
        """Start the timeout of a handshake, unless it is opened `again`, and return the first message."""
        running = self._running.get(address) if again else None
        began = self._clock() if running is None else running.began
        self._running[address] = _Handshake(began, connected=again)
        return self._hello

    def note_connected(self, address: Address) -> None:
        """Record that the transport has connected to a peer, which must have the key for that."""
        if (handshake := self._running.get(address)) is not None:
            handshake.connected = True

    def handle_reply(self, address: Address, answer: bytes) -> None:
        """Process a peer's reply, and update its status."""
        if address not in self._running:
            return  # no handshake is under way, or the reply is too late
        try:
            self._take(address, decode_reply(answer))
        except KVFerryError as error:
            self.refuse(address, str(error))
        except Exception as error:  # noqa: BLE001 - logged in full; only this peer is refused
            self._log.say(type(error).__name__, "control channel: an unexpected error", error)
            self.refuse(address, f"its answer cannot be used: {error}")

    def refuse(
        self, address: Address, reason: str, *, gone: bool = False, seconds: float = REFUSAL_SECONDS
    ) -> None:
        reason, (host, port) = shown(reason, _REASON_CHARACTERS), address
        self._log.say(f"{address}", f"peer at {shown(host)}:{port} cannot be used: {reason}")
        self._running.pop(address, None)
        self._answers[address] = Unusable(reason, gone)
        # A peer may have both times, of different handshakes. Only a status of this kind is forgotten.
        oldest = _store_limited(self._refused_until, address, self._clock() + seconds)
        if oldest is not None and isinstance(self._answers.get(oldest), Unusable):
            self._answers.pop(oldest, None)
        self._closable.append(address)

    def refuse_silent(self) -> list[Address]:
        """Refuse peers that are silent for too long. Return all that became Unusable since the last call."""
        now, self.soonest = self._clock(), math.inf
        for address, handshake in list(self._running.items()):
            patience = self._patience(handshake)
            if now < handshake.began + patience:
                self.soonest = min(self.soonest, handshake.began + patience)
            else:
                self.refuse(
                    address,
                    f"no answer within {patience:g} s; is it up and reachable, and does it have the "
                    "same key?",
                    gone=True,
                )
        refused, self._closable = self._closable, []
        return refused

    def _patience(self, handshake: _Handshake) -> float:
        # Addresses that clients make up never connect. They must not keep others from being asked.
        if not handshake.connected and len(self._running) > HURRY_HANDSHAKES:
            return min(HURRY_SECONDS, self._patience_seconds)
        return self._patience_seconds

    def is_unknown(self, address: Address) -> bool:
        # `forget` removes the status of a peer, but does not end a handshake with it.
        return self._answers.get(address) is None and address not in self._running

    def forget_refusals(self) -> None:
        for address in [one for one in self._refused_until if self._refusal_is_over(one)]:
            del self._refused_until[address]
            if isinstance(self._answers.get(address), Unusable):
                self._answers.pop(address, None)

    def _take(self, address: Address, reply: Reply) -> None:
        if isinstance(reply, Refused):
            self.refuse(address, "; ".join(reply.differences) or "it gave no reason")
        elif isinstance(reply, PeerInfo):
            if found := compare_facts(reply.facts.must_agree, self._hello.facts.must_agree):
                raise Incompatible(found)
            if not reply.ranks:
                raise ProtocolError("the peer sent no ranks; expected one or more")
            self._learn(address, structs.replace(reply, ranks=self._check(address, reply.ranks)))

    def _learn(self, address: Address, peer: PeerInfo) -> None:
        del self._running[address]
        self._answers[address] = peer
        oldest = _store_limited(self._known_since, address, self._clock())
        if oldest is not None and isinstance(self._answers.get(oldest), PeerInfo):
            self._answers.pop(oldest, None)
        name, software = shown(peer.facts.engine_id), shown(peer.facts.software)
        logger.info(
            "peer %s (%s) at %s:%d: %s known", name, software, *address, counted(len(peer.ranks), "rank")
        )

    def _refusal_is_over(self, address: Address) -> bool:
        return self._clock() > self._refused_until.get(address, float("-inf"))


def _store_limited(times: dict[Address, float], address: Address, now: float) -> Address | None:
    """Set the time of a peer; return the oldest peer, which is removed if there are too many, or None."""
    times.pop(address, None)  # a dict is in the order of insertion, so this makes it the newest
    times[address] = now
    if len(times) <= MAX_REMEMBERED:
        return None
    oldest = next(iter(times))
    del times[oldest]
    return oldest
