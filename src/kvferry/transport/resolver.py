"""Resolve the names of peers in background threads, and decide which addresses may be peers.

    (unknown) ─asked→ under way ─addresses→ FRESH ─30 s→ asked again, while the old addresses serve
                          └─none, or 5 s without an answer→ FAILED ─10 s→ (unknown)

The system's resolver may take tens of seconds, so `resolve` and `is_allowed` do not wait for it. They may
return that an address is not known yet. Only names in the setting ``peers`` are resolved. The engine connects
to the address that it checked. So a name cannot resolve to another address between the check and the
connection.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from kvferry.common.errors import KVFerryError
from kvferry.common.limited_log import LimitedLog
from kvferry.common.text import shown
from kvferry.common.threads import Thread
from kvferry.transport.addresses import IP, AllowedPeers, normalize_name, parse_host, parse_ip
from kvferry.transport.messages import RankCard

logger = logging.getLogger(__name__)

# Age in seconds from which a name's addresses are looked up again when they are used.
FRESH_SECONDS = 30.0

# Age in seconds from which addresses are no longer used, if no newer ones were found.
STALE_SECONDS = 300.0

PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 10.0
# Age in seconds from which all names are looked up again if a client has an unknown address.
NEW_SECONDS = 2.0

THREADS = 4

# Type of functions that return the addresses of a host name, or raise OSError.
ResolveName: TypeAlias = Callable[[str], Sequence[str]]


class AddressNotAllowed(KVFerryError):
    """Error: the engine must not connect to a host. The message says why."""


@dataclass(slots=True)
class _Name:
    """The latest results of resolving a host name. Times are in seconds of the resolver's clock."""

    addresses: tuple[IP, ...] = ()  # empty if none were found or they are too old
    found_at: float = -math.inf
    asked_at: float | None = None  # start of the look-up in progress
    failed_at: float = -math.inf  # time of the last look-up that found no address
    failure: str = ""  # error of the last look-up; empty if it found addresses


class PeerResolver:
    """Decides which hosts the engine may connect to, and which clients may connect to it. Thread-safe."""

    def __init__(
        self,
        peers: AllowedPeers,
        on_answer: Callable[[], None] = lambda: None,
        resolve: ResolveName | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the resolver. A background thread calls `on_answer` when a look-up has ended."""
        self._peers, self._on_answer, self._clock = peers, on_answer, clock
        self._resolve = resolve or _resolve
        self._lock = threading.Lock()
        self._names = {name: _Name() for name in peers.names}
        self._wanted: deque[str] = deque()
        self._threads = 0

    def resolve(self, host: str) -> str | None:
        """Return the IP address of a host; None while its name is being resolved. Raise AddressNotAllowed."""
        address = parse_host(host)
        if address is None:
            return self._resolve_name(host)
        admitted = self.is_allowed(address)
        if admitted is False:
            why = "is none of the peers that this engine's configuration allows; list it in peers"
            if self._peers.loopback_only:
                why = (
                    "is another machine, and this engine listens on loopback; set host to an address that "
                    "others reach, or list it in peers"
                )
            raise AddressNotAllowed(f"{address} {why}")
        return str(address) if admitted else None

    def resolve_gathering(self, card: RankCard, address: tuple[str, int], log: LimitedLog) -> RankCard:
        """Return a rank's description with the IP address of its gather channel.

        If that host is not allowed or not resolved yet, the result has no gather channel, and `log` gets a
        line that names `address`, the peer's control channel.
        """
        if card.outgoing is None:
            return card
        try:
            place = self.resolve(card.outgoing.host)
            why = "its name is not resolved yet"
        except AddressNotAllowed as error:
            place, why = None, str(error)
        if place is None:
            (host, port), rank = address, card.geometry
            log.say(
                f"{address}",
                f"peer at {shown(host)}:{port}: rank TP{rank.tp_rank} PP{rank.pp_rank} gathers at "
                f"{shown(card.outgoing.host)}, which is not dialled, so it is read without gathering: "
                f"{shown(why, 200)}",
            )
            return structs.replace(card, outgoing=None)
        return structs.replace(card, outgoing=structs.replace(card.outgoing, host=place))

    def is_allowed(self, address: IP) -> bool | None:
        """Return whether an address belongs to an allowed peer; None while names are being resolved."""
        if self._peers.allows(address):
            return True
        with self._lock:
            if any(address in entry.addresses for entry in map(self._current, self._names.values())):
                return True
            # A listed name may have got this address lately, as when a pod is replaced.
            for name, entry in self._names.items():
                self._ask(name, entry, NEW_SECONDS)
            return None if any(map(self._is_pending, self._names.values())) else False

    def close(self) -> None:
        """Stop calling `on_answer`. Look-ups in progress end by themselves."""
        with self._lock:
            self._on_answer = lambda: None

    def _resolve_name(self, host: str) -> str | None:
        name = normalize_name(host)
        if name not in self._names:
            raise AddressNotAllowed(
                "it is a name that this engine's peers setting does not list, so it is not resolved; list it "
                "there, or let the peer advertise its address (advertise_host)"
            )
        with self._lock:
            entry = self._names[name]
            self._ask(name, entry, FRESH_SECONDS)
            if self._current(entry).addresses:
                return str(entry.addresses[0])
            if self._is_pending(entry):
                return None
            raise AddressNotAllowed(
                f"its name has no address: {entry.failure or 'the name server does not answer'}"
            )

    # -- with the lock ------------------------------------------------------------------------------------

    def _current(self, entry: _Name) -> _Name:
        # If the name server fails, the last addresses serve for a while.
        if self._clock() - entry.found_at > STALE_SECONDS:
            entry.addresses = ()
        return entry

    def _is_pending(self, entry: _Name) -> bool:
        return entry.asked_at is not None and self._clock() - entry.asked_at < PATIENCE_SECONDS

    def _ask(self, name: str, entry: _Name, seconds: float) -> None:
        """Start to look a name up, unless it is looked up, or was in the last `seconds`."""
        now = self._clock()
        tried = now - entry.failed_at < min(seconds, RETRY_SECONDS)
        if entry.asked_at is not None or now - entry.found_at < seconds or tried:
            return
        entry.asked_at = now
        self._wanted.append(name)
        if self._threads < THREADS:
            self._threads += 1
            Thread(self._run, "kvferry-names").start()

    # -- the threads --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._threads -= 1
                    return
                name = self._wanted.popleft()
            addresses, failure = self._look_up(name)
            with self._lock:
                entry = self._names[name]
                entry.asked_at, entry.failure = None, failure
                if addresses:
                    entry.addresses, entry.found_at = addresses, self._clock()
                else:
                    entry.failed_at = self._clock()
                self._on_answer()

    def _look_up(self, name: str) -> tuple[tuple[IP, ...], str]:
        try:
            found = [parse_ip(text) for text in self._resolve(name)]
        except OSError as error:
            return (), error.strerror or str(error)
        except Exception as error:
            logger.exception("resolving a peer's name")
            return (), str(error)
        usable = (one for one in found if one is not None and not (one.is_multicast or one.is_unspecified))
        addresses = tuple(dict.fromkeys(usable))
        return addresses, "" if addresses else "the name server knows none"


def _resolve(name: str) -> Sequence[str]:
    return [str(place[0]) for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
