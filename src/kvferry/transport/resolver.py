"""Addresses of peers whose names the configuration lists, resolved in threads of their own.

    (unknown) ─asked→ under way ─addresses→ FRESH ─30 s→ asked again, while the old addresses serve
                          └─none, or 5 s without an answer→ FAILED ─10 s→ (unknown)

`resolve` and `is_allowed` never block, because the system's resolver may take tens of seconds: they may
return that an address is not known yet. Only names that the configuration lists are resolved. The engine
dials the address that it checked, so a name cannot stand for another address when it is used.
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

from kvferry.errors import KVFerryError
from kvferry.transport.address import IP, parse_ip
from kvferry.transport.allowed_peers import AllowedPeers, normalize_name

logger = logging.getLogger(__name__)

FRESH_SECONDS = 30.0
"""Seconds after which addresses are looked up again when they are used."""

STALE_SECONDS = 300.0
"""Seconds after which addresses are forgotten if the resolver has no new ones."""

PATIENCE_SECONDS = 5.0
RETRY_SECONDS = 10.0
NEW_SECONDS = 2.0
"""Seconds after which names are looked up again if a client's address is unknown."""

THREADS = 4


class AddressNotAllowed(KVFerryError):
    """Raised for a host that must not be dialled; the message is the reason."""


@dataclass(slots=True)
class _Name:
    """The resolver's last answers for a name.

    Attributes:
        addresses: found at `found_at`.
        asked_at: when the resolver was asked, None if it has answered.
        failed_at, failure: time and error of the last answer without addresses.
    """

    addresses: tuple[IP, ...] = ()
    found_at: float = -math.inf
    asked_at: float | None = None
    failed_at: float = -math.inf
    failure: str = ""


class PeerResolver:
    """Decides which hosts may be dialled and which clients may connect; any thread may ask."""

    def __init__(
        self,
        peers: AllowedPeers,
        on_answer: Callable[[], None] = lambda: None,
        resolve: Callable[[str], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it without resolving any name.

        Args:
            peers: machines that may be peers.
            on_answer: called in a thread when the resolver has answered.
            resolve: returns addresses of a name, or raises OSError; by default the system's resolver.
            clock: seconds.
        """
        self._peers, self._on_answer, self._clock = peers, on_answer, clock
        self._resolve = resolve or _resolve
        self._lock = threading.Lock()
        self._names = {name: _Name() for name in peers.names}
        self._wanted: deque[str] = deque()
        self._threads = 0

    def resolve(self, host: str) -> str | None:
        """Return the address to dial for a host; None while it is being resolved.

        Raises:
            AddressNotAllowed: it may not be dialled, or has no address.
        """
        address = parse_ip("127.0.0.1" if host == "localhost" else host)
        if address is None:
            return self._resolve_name(host)
        admitted = self.is_allowed(address)
        if admitted is False:
            raise AddressNotAllowed(self._refusal(address))
        return str(address) if admitted else None

    def is_allowed(self, address: IP) -> bool | None:
        """Return whether an address may be a peer's; None while a name that may have it is being resolved."""
        if self._peers.allows(address):
            return True
        with self._lock:
            if any(address in entry.addresses for entry in map(self._current, self._names.values())):
                return True
            for name, entry in self._names.items():
                self._ask(name, entry, NEW_SECONDS)
            return None if any(map(self._is_pending, self._names.values())) else False

    def close(self) -> None:
        """Stop calling `on_answer`."""
        with self._lock:
            self._on_answer = lambda: None

    def _resolve_name(self, host: str) -> str | None:
        if not self._peers.lists(host):
            raise AddressNotAllowed(
                "it is a name that this engine's peers setting does not list, so it is not resolved; list it "
                "there, or let the peer advertise its address (advertise_host)"
            )
        with self._lock:
            entry = self._names[normalize_name(host)]
            self._ask(normalize_name(host), entry, FRESH_SECONDS)
            if self._current(entry).addresses:
                return str(entry.addresses[0])
            if self._is_pending(entry):
                return None
            raise AddressNotAllowed(
                f"its name has no address: {entry.failure or 'the name server does not answer'}"
            )

    def _refusal(self, address: IP) -> str:
        if self._peers.only_here:
            return (
                f"{address} is another machine, and this engine listens on loopback; set host to an address "
                "that others reach, or list it in peers"
            )
        return f"{address} is none of the peers that this engine's configuration allows; list it in peers"

    # -- with the lock ------------------------------------------------------------------------------------

    def _current(self, entry: _Name) -> _Name:
        """Return an entry, without addresses that are too old."""
        if self._clock() - entry.found_at > STALE_SECONDS:
            entry.addresses = ()
        return entry

    def _is_pending(self, entry: _Name) -> bool:
        return entry.asked_at is not None and self._clock() - entry.asked_at < PATIENCE_SECONDS

    def _ask(self, name: str, entry: _Name, seconds: float) -> None:
        """Start resolving a name if its addresses are older than `seconds` and it has not failed recently."""
        now = self._clock()
        tried = now - entry.failed_at < min(seconds, RETRY_SECONDS)
        if entry.asked_at is not None or now - entry.found_at < seconds or tried:
            return
        entry.asked_at = now
        self._wanted.append(name)
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=self._run, name="kvferry-names", daemon=True).start()

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
