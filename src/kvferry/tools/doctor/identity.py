"""Ask an engine over its control channel for a description of itself.

No KV is read.

    Hello(no facts)    ──────▶
                       ◀──────   PeerInfo
    AskTurn(no keys)   ──────▶                   timed several times; the engine keeps no state
                       ◀──────   Turns(none)

Facts are the properties of an engine that must agree with those of its peers. An engine refuses a peer only
if a fact of both differs. This client sends no facts, so every engine describes itself to it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import zmq

import kvferry
from kvferry.common.errors import KVFerryError, ProtocolError
from kvferry.keys import prompt_digest
from kvferry.transport import (
    PROTOCOL,
    Address,
    AskTurn,
    Claim,
    ControlSocket,
    Facts,
    Hello,
    Keys,
    PeerInfo,
    PromptContent,
    RankCard,
    Redeem,
    Refused,
    Request,
    Turns,
    new_incarnation,
)

_ROUNDS = 7
# A socket that is closed at once drops what it has not sent, and the lease would live on.
_LINGER_MILLISECONDS = 1000
_GREETING_BYTES = 64
_GIVE_KEY = (
    "give --secret-file, or a --config with secret_file; or run this as the engine's user on its machine"
)
_SAME_VERSION = "use the same kvferry version on both sides"
_MECHANISM = slice(12, 32)
# First bytes of a ZMTP 3.0 greeting (rfc.zeromq.org/spec/23): signature and version. A server answers with
# the name of its security mechanism. It would close the connection if this greeting named another mechanism.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"


class IdentifyError(KVFerryError):
    """Raised if an engine's control channel cannot be reached, does not answer, or answers unexpectedly."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """An engine's description of itself: `ranks` are its workers, and the round-trip time is a median."""

    address: Address
    facts: Facts
    ranks: tuple[RankCard, ...]
    round_trip_seconds: float


def identify(address: Address, keys: Keys | None, seconds: float) -> EngineIdentity:
    """Ask the engine whose control channel is at `address` for a description of itself.

    Raises:
        IdentifyError: no engine answers at the address, the engine has a different key or no encryption, it
            refuses to describe itself, or `keys` is None.
    """
    until = time.monotonic() + seconds
    # Asked first, because a CURVE client gets no answer at all from a server without encryption.
    if (mechanism := _mechanism(address, seconds)) != "CURVE":
        raise IdentifyError(
            f"it communicates without encryption ({mechanism}), which no kvferry engine does", _SAME_VERSION
        )
    if keys is None:
        raise IdentifyError("it asks for a key, but this user has none on this machine", _GIVE_KEY)
    facts = Facts("kvferry-doctor", new_incarnation(), f"kvferry {kvferry.__version__}", {})
    with _connected(address, keys) as channel:
        peer, durations = _ask(channel, Hello(PROTOCOL, facts), PeerInfo, until), []
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            _ask(channel, AskTurn(0, 1, []), Turns, until)
            durations.append(time.perf_counter() - asked)
    if not peer.ranks:
        raise IdentifyError("its description has no ranks", _SAME_VERSION)
    return EngineIdentity(address, peer.facts, peer.ranks, median(durations))


def release_ticket(address: Address, keys: Keys, ticket: bytes, tokens: Sequence[int]) -> None:
    """Have an engine free the blocks that it keeps for a peer, without reading their KV.

    `tokens` are those of the prompt, which has no images, LoRA adapter or cache salt.
    """
    # An engine releases only what was redeemed.
    consumer, content = new_incarnation(), PromptContent(prompt_digest(tokens))
    with _connected(address, keys, _LINGER_MILLISECONDS) as channel:
        channel.send(Redeem(0, consumer, ticket, len(tokens), content))
        channel.send(Claim(consumer, [ticket], released=True))


@contextmanager
def _connected(address: Address, keys: Keys, linger_milliseconds: int = 0) -> Iterator[ControlSocket]:
    """Yield a connection. Raise IdentifyError if the address is malformed or the socket fails."""
    context: zmq.Context[Any] = zmq.Context()
    channel = None
    try:
        channel = ControlSocket(context, *address, keys)
        yield channel
    except zmq.ZMQError as error:
        raise IdentifyError(f"cannot connect: {error}", "correct the address") from error
    finally:
        if channel is not None:
            channel.close(linger_milliseconds)
        context.term()


def _ask(channel: ControlSocket, message: Request, kind: type[Any], deadline: float) -> Any:
    """Return the answer. Raise IdentifyError if no `kind` arrives until `deadline`, in monotonic seconds."""
    try:
        reply = channel.ask(message, deadline)
    except TimeoutError as error:
        raise IdentifyError(
            "it does not answer: it has another key, or its peers setting does not include this machine",
            f"{_GIVE_KEY}; or add this machine to the engine's peers setting",
        ) from error
    except ProtocolError as error:
        raise IdentifyError(f"its answer is {error}", _SAME_VERSION) from error
    if isinstance(reply, Refused):
        raise IdentifyError("; ".join(reply.differences) or "it refuses without a reason", _SAME_VERSION)
    if not isinstance(reply, kind):
        what = f"it answers {type(reply).__name__} to {type(message).__name__}"
        raise IdentifyError(what, _SAME_VERSION)
    return reply


def _mechanism(address: Address, seconds: float) -> str:
    """Return a server's mechanism, such as ``CURVE``. Raise IdentifyError if it speaks no ZeroMQ."""
    until = time.monotonic() + seconds
    received = b""
    try:
        with socket.create_connection((address[0], address[1]), timeout=seconds) as connection:
            connection.sendall(_GREETING)
            while len(received) < _GREETING_BYTES:
                connection.settimeout(max(0.001, until - time.monotonic()))
                if not (part := connection.recv(_GREETING_BYTES - len(received))):
                    break
                received += part
    except TimeoutError as error:
        if not received:
            raise IdentifyError(
                f"no answer within {seconds:g} s",
                "check that it is up, and that no firewall blocks the connection",
            ) from error
    except OSError as error:
        raise IdentifyError(
            f"it cannot be reached: {error.strerror or error}",
            "check that it is up, and that the address is the one in its kv_transfer_params",
        ) from error
    if len(received) < _GREETING_BYTES or received[0] != 0xFF:
        raise IdentifyError(
            "the server at this address is not an engine's control channel",
            "give remote_host and remote_port from its kv_transfer_params, or its HTTP address with http://",
        )
    return received[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
