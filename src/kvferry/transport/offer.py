"""Offers of KV, which travel with a request as its ``kv_transfer_params``.

The keys are those of vLLM's NixlConnector, so routers made for it work unchanged: they copy the object from
the prefill engine's response to the request to the decode engine. ``remote_request_id`` carries the ticket,
which the decode engine redeems (`transport.redeem`). ``remote_sealed_grant`` has the answer in advance
(`transport.seal`). An offer comes from a client, so it is checked against a schema before it is used.

A router may ask both engines at once. It then draws the ticket, and makes the offer for the decode engine
itself, from an earlier offer of the prefill engine.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec.structs import fields

from kvferry.common.errors import ProtocolError
from kvferry.common.text import shown
from kvferry.transport.addresses import parse_engine
from kvferry.transport.handshake import Address
from kvferry.transport.messages import Host, Port
from kvferry.transport.redeem import MAX_TOKENS

_EngineId = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,256}\Z")]
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=MAX_TOKENS)]

MAX_REMOTE_CACHES = 4

MAX_UNWANTED = 256
"""Maximum number of names of unwanted KV in a request."""


class Offer(msgspec.Struct, frozen=True):
    """An engine's offer of the KV of a prompt prefix, as sent in ``kv_transfer_params``.

    Attributes:
        remote_host, remote_port: address of the offering engine's control channel.
        remote_request_id: ticket, as 32 hex digits.
        remote_num_tokens: number of offered tokens, from the start of the prompt. None for all tokens but the
            last one, if the offering engine is still computing them.
        remote_step_tokens: number of tokens of a prompt that the offering engine computes in one step. Its KV
            may be read while it computes longer prompts. 0 if KV can only be read after the last step. Offers
            of older releases lack the key; whether such an engine can be read from, the handshake decides.
        remote_prefill_cached_tokens: number of prompt tokens that the offering engine's caches had. vLLM adds
            it to the response. None if the offering engine is still computing the prompt.
        remote_sealed_grant: the grant of the ticket, which only engines can open (`transport.seal`). Empty if
            it would be too long. Offers of older releases, and those that routers make, lack the key.
    """

    remote_engine_id: _EngineId
    remote_host: Host
    remote_port: Port
    remote_request_id: _Hex
    remote_num_tokens: _Tokens | None
    remote_step_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    remote_prefill_cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)] | None = None
    remote_sealed_grant: str = ""


def has_offer(params: Any) -> bool:
    """Return whether a request's ``kv_transfer_params`` contain an offer, sound or malformed."""
    return params is not None and not (isinstance(params, dict) and not params.get("do_remote_prefill"))


def read_offer(params: Any) -> Offer | None:
    """Return the offer in a request's ``kv_transfer_params``; None if they contain none.

    Raises:
        ProtocolError: the offer is malformed.
    """
    if not has_offer(params):
        return None
    try:
        return msgspec.convert(params, Offer)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ProtocolError(
            f"kv_transfer_params: {_fault(params, str(error))}; send what the prefill engine has answered, "
            "unchanged, and run the same release of kvferry on both engines"
        ) from error


def read_remote_caches(params: Any) -> tuple[Address, ...]:
    """Return the engines that a request's ``kv_transfer_params`` name in ``remote_caches``.

    Their host memory may have the prompt's KV. Raise ProtocolError unless it is a list of at most
    `MAX_REMOTE_CACHES` addresses such as ``10.0.0.1:5700``.
    """
    texts = params.get("remote_caches") if isinstance(params, dict) else None
    if texts is None:
        return ()
    found = [parse_engine(text) for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    if not isinstance(texts, list) or len(found) != len(texts) or None in found:
        raise ProtocolError(
            f"kv_transfer_params: remote_caches is {shown(repr(texts), 200)}; send a list of addresses of "
            "engines' fleet tiers, such as 10.0.0.1:5700, or leave it out"
        )
    if len(found) > MAX_REMOTE_CACHES:
        raise ProtocolError(
            f"kv_transfer_params: remote_caches names {len(found)} engines, at most {MAX_REMOTE_CACHES}"
        )
    return tuple(one for one in found if one is not None)


def _fault(params: Any, error: str) -> str:
    """Return why parameters of a request are no offer, in words that repeat no value of the client's."""
    if not isinstance(params, dict):
        return "not an object"
    missing = [one.name for one in fields(Offer) if one.required and one.name not in params]
    if missing:
        return f"{', '.join(missing)} missing"
    wrong = [one.name for one in fields(Offer) if f"`$.{one.name}`" in error]
    return f"invalid value of {wrong[0]}" if wrong else "text that is not Unicode"


def write_offer(offer: Offer) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a response that makes an offer."""
    params: dict[str, Any] = msgspec.to_builtins(offer)
    del params["remote_prefill_cached_tokens"]  # vLLM adds it
    if not offer.remote_sealed_grant:
        del params["remote_sealed_grant"]
    return {"do_remote_prefill": True, "do_remote_decode": False, **params}


def write_nothing(*, stopped: bool = False) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a response without an offer.

    If `stopped`, this engine offers no KV of later prompts either, so that a router need not ask it.
    """
    nothing = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}
    return {**nothing, "remote_stopped": True} if stopped else nothing


def wants_prefill(params: Any) -> bool:
    """Return whether a request's ``kv_transfer_params`` ask this engine to prefill for another engine."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def ticket_of(params: Any) -> bytes | None:
    """Return the ticket that a router has drawn for a prompt that this engine prefills; None without one."""
    try:
        return bytes.fromhex(msgspec.convert(params["remote_request_id"], _Hex))
    except (KeyError, TypeError, msgspec.ValidationError, UnicodeError):
        return None


class _Wanted(msgspec.Struct, frozen=True):
    """The router's random name for the KV of a prompt, and names of KV that no decode engine will read."""

    # Only the router and this engine know the name, so nobody else can end the lease with it.
    remote_name: _Hex | None = None
    remote_unwanted: Annotated[tuple[_Hex, ...], msgspec.Meta(max_length=MAX_UNWANTED)] = ()


def read_wanted(params: Any) -> _Wanted:
    """Return what a router says about unwanted KV; nothing if it is malformed."""
    try:
        return msgspec.convert(params, _Wanted)
    except (msgspec.ValidationError, UnicodeError):
        return _Wanted()
