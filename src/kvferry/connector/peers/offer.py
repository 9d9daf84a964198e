"""Offers of KV that travel with a request as its ``kv_transfer_params``: a ticket, and who redeems it.

The keys of vLLM's NixlConnector mean the same here, so routers made for it work unchanged: they copy the
object from one answer to the next request. ``remote_request_id`` carries the ticket, 128 random bits.
``remote_num_tokens`` says how many tokens it is for. Block tables and leases never pass through users: the
engine that redeems the ticket with a prompt of the same content gets them over the control channel
(`transport.redeem`). An offer comes from a user, so it is checked against a schema before it is used.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.errors import ProtocolError
from kvferry.transport.handshake import Address
from kvferry.transport.messages import Host, Port
from kvferry.transport.redeem import MAX_TOKENS

_EngineId = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,256}\Z")]
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]


class Offer(msgspec.Struct, frozen=True):
    """A ticket for the blocks of the beginning of a prompt.

    Attributes:
        remote_engine_id: the engine that keeps them.
        remote_host, remote_port: address of its control channel.
        remote_request_id: the ticket as 32 hex digits.
        remote_num_tokens: tokens offered, from the start of the prompt.
    """

    remote_engine_id: _EngineId
    remote_host: Host
    remote_port: Port
    remote_request_id: _Hex
    remote_num_tokens: _Tokens

    @property
    def address(self) -> Address:
        """Address of the producer's control channel."""
        return self.remote_host, self.remote_port

    @property
    def ticket(self) -> bytes:
        """The ticket as the control channel carries it."""
        return bytes.fromhex(self.remote_request_id)


def wants_prefill(params: Any) -> bool:
    """Return whether a request asks this engine to compute a prompt for another."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def read_offer(params: Any) -> Offer | None:
    """Return the offer that came with a request; None if none did.

    Raises:
        ProtocolError: there is one and it cannot be used.
    """
    if params is None or (isinstance(params, dict) and not params.get("do_remote_prefill")):
        return None
    try:
        return msgspec.convert(params, Offer)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error


def write_offer(offer: Offer) -> dict[str, Any]:
    """Return an offer as ``kv_transfer_params`` of the response."""
    params: dict[str, Any] = msgspec.to_builtins(offer)
    return {"do_remote_prefill": True, "do_remote_decode": False, **params}


def write_nothing() -> dict[str, Any]:
    """Return ``kv_transfer_params`` without an offer: the decode engine computes the prompt itself."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}
