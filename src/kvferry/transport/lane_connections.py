"""The connections of a lane to its peers.

    ASKED ─passed─▶ UP ─the transport fails─▶ DOWN ─an order after a pause─▶ ASKED
      └─refused, or no connection can be made─▶ DOWN, for a longer pause each time

In state ASKED, a child process tries the peer's transport metadata (`transport.metadata_validation`).

If a read still uses a connection, the connection is closed when the read has ended. Until then the lane opens
no other connection to that peer, because the transport identifies a peer by its name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvferry.errors import KVFerryError, TransferError
from kvferry.transport.connected_peer import ConnectedPeer
from kvferry.transport.messages import RankCard
from kvferry.transport.metadata_validation import ValidationResult

logger = logging.getLogger(__name__)

_LONGEST_SECONDS = 60.0


def pause_seconds(failures: int) -> float:
    """Return the seconds to wait before a retry, after a number of failures in succession.

    >>> [pause_seconds(failures) for failures in (1, 2, 3, 4, 100)]
    [0.0, 1.0, 2.0, 4.0, 60.0]
    """
    return 0.0 if failures < 2 else min(2.0 ** min(failures - 2, 10), _LONGEST_SECONDS)


@dataclass(slots=True)
class _PeerConnection:
    """A peer and its connection: UP if `peer` is set, ASKED if `verdict` is set, DOWN if neither is.

    Attributes:
        reason: why there is no connection; only used in state DOWN.
        failures: number of consecutive failures to connect to the peer or to read from it.
        retry_at: time before which the peer is not connected again.
    """

    cards: tuple[RankCard, ...]
    peer: ConnectedPeer | None = None
    verdict: ValidationResult | None = None
    reason: str = ""
    failures: int = 0
    retry_at: float = 0.0


class LaneConnections:
    """The connections of one lane to its peers, by name of the peer. Only the lane's thread uses it.

    Peers that fail are connected again with exponential backoff.
    """

    def __init__(
        self,
        make: Callable[[tuple[RankCard, ...]], ConnectedPeer],
        validate: Callable[[tuple[RankCard, ...]], ValidationResult],
        in_use: Callable[[], Collection[ConnectedPeer]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty collection.

        Args:
            make: connects to the ranks of a peer. It raises an exception if it cannot.
            validate: starts to validate the metadata of a peer's ranks, and returns at once.
            in_use: returns the connections that reads in progress use.
        """
        self._make, self._vet, self._in_use, self._clock = make, validate, in_use, clock
        self._links: dict[str, _PeerConnection] = {}
        # Those in state ASKED and UP, so that polls and reads do not search all peers.
        self._asked: dict[str, _PeerConnection] = {}
        self._up: dict[ConnectedPeer, _PeerConnection] = {}
        self._leaving: list[tuple[str, ConnectedPeer]] = []

    def connect(self, name: str, cards: tuple[RankCard, ...]) -> None:
        """Start to connect a peer, unless it is connected. Its transport metadata is validated first."""
        link = self._links.get(name)
        if link is None or link.peer is None:
            self._asked.pop(name, None)
            link = self._links[name] = _PeerConnection(cards)
            self._ask(name, link)
            self._apply_verdict(name, link)

    def disconnect(self, name: str) -> None:
        """Forget a peer. Its connection is closed when no read uses it any more."""
        link = self._links.pop(name, None)
        self._asked.pop(name, None)
        if link is not None and link.peer is not None:
            del self._up[link.peer]
            self._leaving.append((name, link.peer))

    def get(self, name: str) -> ConnectedPeer | str | None:
        """Return the connection to a peer; None while it is being validated, or why there is none.

        If the peer failed and may be retried now, start to connect it again.
        """
        link = self._links.get(name)
        if link is None:
            return f"peer {name} is not connected"
        if link.peer is None and link.verdict is None and self._clock() >= link.retry_at:
            self._ask(name, link)
        self._apply_verdict(name, link)
        if link.verdict is not None:
            return None
        return link.reason if link.peer is None else link.peer

    def process_verdicts(self) -> bool:
        """Connect peers whose metadata has passed, mark refused ones as failed; return whether any was."""
        settled = [self._apply_verdict(name, link) for name, link in list(self._asked.items())]
        return any(settled)

    def mark_failed(self, peer: ConnectedPeer, reason: str) -> None:
        """Record that a connection failed. `get` returns the reason until the pause is over."""
        for name, link in self._links.items():
            if link.peer is peer:
                link.peer = None
                del self._up[peer]
                self._leaving.append((name, peer))
                self._mark_down(link, reason)

    def mark_served(self, peer: ConnectedPeer) -> None:
        """Record that a read from a peer has succeeded, which ends its failures in succession."""
        if (link := self._up.get(peer)) is not None:
            link.failures = 0

    def close_unused(self) -> None:
        """Close the connections that failed or were disconnected and that no read uses any more."""
        in_use = self._in_use()
        for entry in [entry for entry in self._leaving if entry[1] not in in_use]:
            self._leaving.remove(entry)
            try:
                entry[1].close()
            except Exception:
                logger.exception("lane: an error while closing the connection to %s", entry[0])

    def __iter__(self) -> Iterator[ConnectedPeer]:
        yield from (peer for _, peer in self._leaving)
        yield from (link.peer for link in self._links.values() if link.peer is not None)

    def _ask(self, name: str, link: _PeerConnection) -> None:
        self.close_unused()
        # The transport identifies a peer by its name, so it can have only one connection to it.
        if any(name == leaving for leaving, _ in self._leaving):
            link.reason = f"peer {name} cannot be read from: reads of its last connection are in flight"
            return
        link.verdict = self._vet(link.cards)
        self._asked[name] = link

    def _apply_verdict(self, name: str, link: _PeerConnection) -> bool:
        if link.verdict is None or (refusal := link.verdict.reason) is None:
            return False
        link.verdict = None
        self._asked.pop(name, None)
        try:
            if refusal:
                raise TransferError(refusal)
            link.peer = self._make(link.cards)
            self._up[link.peer] = link
        except Exception as error:  # noqa: BLE001 - only this peer is DOWN
            log_unexpected(error)
            self._mark_down(link, f"peer {name} cannot be read from: {error}")
        return True

    def _mark_down(self, link: _PeerConnection, reason: str) -> None:
        link.reason, link.failures = reason, link.failures + 1
        link.retry_at = self._clock() + pause_seconds(link.failures)


def log_unexpected(error: Exception) -> None:
    """Log an error with its traceback, unless it is one of kvferry's own errors."""
    if not isinstance(error, KVFerryError):
        logger.error("lane: unexpected error, please report it: %s", error, exc_info=error)
