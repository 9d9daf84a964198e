"""The state of the handshakes with peers. This module opens no sockets.

    (unknown) ─start→ LOOKING ─ranks arrive→ KNOWN
                         └─refused, silent or malformed→ REFUSED ─after a while→ (unknown)

Requests name the addresses of peers, so a client can make the engine contact any number of addresses.
Therefore the number of concurrent handshakes is limited. While there are many, silent peers time out early.
The number of remembered peers is limited too.

The engine's thread uses `status`, `is_full`, `start` and `forget`. The thread with the sockets uses the rest.
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
from kvferry.units import counted

logger = logging.getLogger(__name__)

REFUSAL_SECONDS = 10.0
"""Seconds for which a refused peer is not contacted again."""

GONE_SECONDS = 1.0
"""The same for a peer to which no connection can be opened. It may be back soon, and asking takes no time."""

GONE = "no connection can be opened to it; has its engine ended, or is its host unreachable?"

REFRESH_SECONDS = 2.0
"""Minimum seconds between handshakes with a known peer whose tickets name another run of its engine."""

MAX_HANDSHAKES = 64
"""Maximum number of concurrent handshakes."""

HURRY_HANDSHAKES = 32
"""Number of concurrent handshakes above which silent peers time out early."""

HURRY_SECONDS = 0.5
"""Timeout of a silent peer in seconds, while more than `HURRY_HANDSHAKES` handshakes are under way."""

MAX_REMEMBERED = 1024
"""Maximum number of remembered refusals, and maximum number of known peers; the oldest are forgotten."""

_REASON_CHARACTERS = 2000

Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pending:
    """Status of a peer: the handshake with the peer is under way."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Status of a peer: this engine can read from the peer.

    Attributes:
        facts: ids, software versions and KV settings that the peer reported in the handshake.
        ranks: description of every worker of the peer.
    """

    facts: Facts
    ranks: tuple[RankCard, ...]


@dataclass(frozen=True, slots=True)
class Unusable:
    """Status of a peer: this engine cannot read from the peer.

    Attributes:
        reason: why this engine cannot read from the peer, as text for logs.
        gone: True if the peer cannot be reached or has not answered in time.
    """

    reason: str
    gone: bool = False


PeerStatus: TypeAlias = Pending | PeerInfo | Unusable


@dataclass(slots=True)
class _Handshake:
    """A handshake with a peer that is under way.

    Attributes:
        began: time of the first message to the peer, in seconds of the clock of `Handshakes`.
        facts: ids, software versions and KV settings of the peer; None until the peer has accepted this
            engine.
    """

    began: float
    facts: Facts | None = None


class Handshakes:
    """The handshakes with all peers, and the status of each peer. Each handshake has its own deadline.

    This class creates the messages to send and processes the replies; the caller owns the sockets.
    """

    def __init__(
        self,
        facts: Facts,
        check: Callable[[Address, tuple[RankCard, ...]], tuple[RankCard, ...]],
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty collection of handshakes.

        Args:
            facts: description of this engine (ids, software versions, KV settings), which is sent to peers.
            check: function that takes a peer's address and the descriptions of its ranks, and returns the
                descriptions with IP addresses in place of host names. It raises Incompatible if this engine
                cannot read from the ranks.
            patience_seconds: timeout of a handshake, in seconds.
            clock: function that returns the current time in seconds.
        """
        self._facts, self._check, self._patience_seconds, self._clock = facts, check, patience_seconds, clock
        self._answers: dict[Address, PeerStatus] = {}
        self._refused_until: dict[Address, float] = {}
        self._asked_anew: dict[Address, float] = {}
        self._looking: dict[Address, None] = {}
        self._known_since: dict[Address, float] = {}
        self._closable: list[Address] = []
        self._log = LimitedLog(logger, clock=clock)
        self._running: dict[Address, _Handshake] = {}

    # -- the engine's thread ------------------------------------------------------------------------------

    def status(self, address: Address, incarnation: int | None = None) -> PeerStatus | None:
        """Return the status of a peer. Return None if the caller must start a new handshake with the peer.

        A new handshake is needed if the peer is unknown, or became Unusable some time ago (`REFUSAL_SECONDS`,
        or `GONE_SECONDS` if no connection can be opened to it). It is also needed if `incarnation` differs
        from the one that the peer reported in the last handshake, because the peer may have restarted. But
        then None is returned at most once per `REFRESH_SECONDS`; the other calls return the old PeerInfo. So
        a caller that passes `incarnation` must compare it with `PeerInfo.facts.incarnation`.

        Args:
            address: (host, port) of the peer's control channel.
            incarnation: random number that identifies the run of the peer that the caller expects; None if
                any run will do.
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
        """True while the maximum number of handshakes is under way, so that no further one may be started."""
        return len(self._looking) >= MAX_HANDSHAKES

    def start(self, address: Address) -> Pending:
        """Set the status of a peer to Pending, and return that status.

        Next, `open` must be called. It returns the first message, which must then be sent to the peer.

        Args:
            address: (host, port) of the peer's control channel.
        """
        self._looking[address] = None
        answer = self._answers[address] = Pending()
        return answer

    def forget(self, address: Address) -> None:
        """Forget the status of a peer, so that its next use starts a new handshake."""
        self._looking.pop(address, None)
        self._answers.pop(address, None)

    # -- the thread that has the sockets ------------------------------------------------------------------

    @property
    def deadlines(self) -> list[float]:
        """Deadlines of all handshakes under way, in seconds of the constructor's `clock`."""
        return [one.began + self._patience(one) for one in list(self._running.values())]

    def open(self, address: Address, *, again: bool = False) -> Hello:
        """Start the timeout of the handshake with a peer, and return the first message to send to it.

        Args:
            address: (host, port) of the peer's control channel.
            again: True if the connection was opened again. The timeout of a handshake under way goes on.
        """
        running = self._running.get(address) if again else None
        self._running[address] = _Handshake(self._clock() if running is None else running.began)
        return Hello(PROTOCOL, self._facts)

    def handle_reply(self, address: Address, answer: bytes) -> AskRanks | None:
        """Process a peer's reply to a handshake message, and return the next message to send to the peer.

        The status of the peer becomes Unusable if the peer refuses this engine, its reply is malformed, or
        the engines are incompatible. The status becomes PeerInfo if the reply completes the handshake.

        Args:
            address: (host, port) of the peer's control channel.
            answer: encoded reply.

        Returns:
            Next message; None if the handshake needs no further message.
        """
        handshake = self._running.get(address)
        if handshake is None:
            return None  # no handshake is under way, or the reply is too late
        try:
            return self._take(address, handshake, decode_reply(answer))
        except KVFerryError as error:
            self.refuse(address, str(error))
        except Exception as error:  # noqa: BLE001 - logged in full; only this peer is refused
            self._log.say(type(error).__name__, "control channel: an unexpected error", error)
            self.refuse(address, f"its answer cannot be used: {error}")
        return None

    def refuse(
        self, address: Address, reason: str, *, gone: bool = False, seconds: float = REFUSAL_SECONDS
    ) -> None:
        """Set the status of a peer to Unusable, and log the reason.

        Args:
            address: (host, port) of the peer's control channel.
            reason: why this engine cannot read from the peer, as text for logs.
            gone: True if the peer cannot be reached or has not answered in time.
            seconds: seconds for which the peer is not contacted again.
        """
        reason = shown(reason, _REASON_CHARACTERS)
        host, port = address
        self._log.say(f"{address}", f"peer at {shown(host)}:{port} cannot be used: {reason}")
        self._running.pop(address, None)
        self._looking.pop(address, None)
        self._answers[address] = Unusable(reason, gone)
        until = self._clock() + seconds
        if (oldest := _store_limited(self._refused_until, address, until)) is not None and isinstance(
            self._answers.get(oldest), Unusable
        ):
            self._answers.pop(oldest, None)
        self._closable.append(address)

    def pop_refused(self) -> list[Address]:
        """Return the (host, port) of each peer whose status became Unusable since the last call.

        The caller closes the sockets to these peers.
        """
        refused, self._closable = self._closable, []
        return refused

    def refuse_silent(self) -> None:
        """Set the status of every peer whose handshake has timed out to Unusable."""
        now = self._clock()
        for address, handshake in list(self._running.items()):
            patience = self._patience(handshake)
            if now >= handshake.began + patience:
                self.refuse(
                    address,
                    f"no answer within {patience:g} s; is it up and reachable, and does it have the "
                    "same key?",
                    gone=True,
                )

    def refuse_unreachable(self, address: Address) -> None:
        """Set the status of a peer to Unusable, because an attempt to connect to it has failed."""
        self.refuse(address, GONE, gone=True, seconds=GONE_SECONDS)

    def is_refused(self, address: Address) -> bool:
        """Return whether the status of a peer is Unusable."""
        return isinstance(self._answers.get(address), Unusable)

    def _patience(self, handshake: _Handshake) -> float:
        """Return the timeout of a handshake in seconds.

        The timeout is shorter if the peer has not replied at all and many handshakes are under way.
        """
        if handshake.facts is None and len(self._running) > HURRY_HANDSHAKES:
            return min(HURRY_SECONDS, self._patience_seconds)
        return self._patience_seconds

    def is_unknown(self, address: Address) -> bool:
        """Return whether a peer has no status, and no handshake with it is under way.

        `forget` removes the status of a peer, but does not end a handshake with it.
        """
        return self._answers.get(address) is None and address not in self._running

    def forget_refusals(self) -> None:
        """Forget the status of the Unusable peers that may be contacted again."""
        for address in [one for one in self._refused_until if self._refusal_is_over(one)]:
            del self._refused_until[address]
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
        if (oldest := _store_limited(self._known_since, address, self._clock())) is not None and isinstance(
            self._answers.get(oldest), PeerInfo
        ):
            self._answers.pop(oldest, None)
        logger.info(
            "peer %s (%s) at %s:%d: %s known",
            shown(facts.engine_id),
            shown(facts.software),
            *address,
            counted(len(ranks), "rank"),
        )

    def _refusal_is_over(self, address: Address) -> bool:
        return self._clock() > self._refused_until.get(address, float("-inf"))


def _store_limited(times: dict[Address, float], address: Address, now: float) -> Address | None:
    """Set the time of a peer in a dict. If the dict then exceeds `MAX_REMEMBERED`, remove its first entry.

    Args:
        times: dict to change: maps the (host, port) of a peer to a time in seconds.
        address: (host, port) of the peer.
        now: time in seconds, to be stored for the peer.

    Returns:
        Address of the peer whose entry was removed; None if no entry was removed.
    """
    times.pop(address, None)
    times[address] = now
    if len(times) <= MAX_REMEMBERED:
        return None
    oldest = next(iter(times))
    del times[oldest]
    return oldest
