"""Offers of KV that travel with a request as its ``kv_transfer_params``.

The keys of vLLM's NixlConnector mean the same here, so routers made for it work unchanged. kvferry adds
``remote_num_tokens`` (how many tokens), ``remote_lease`` (the ticket), and digests of what the KV was
computed from: ``remote_digest`` (tokens), ``remote_items`` (images), ``remote_adapter`` (LoRA adapter). A
router copies the object. Since anything may come back, an offer is checked against a schema, the prompt that
it came with and the peer that it names.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.engines.vllm.adapters import Adapters
from kvferry.engines.vllm.prompt import PromptContent, content_of
from kvferry.errors import NotYetNamed, ProtocolError, Unnameable
from kvferry.transport.handshake import Known
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Host, Port

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Lease(msgspec.Struct, frozen=True):
    """A `LeaseWord` as JSON."""

    slot: _Count
    generation: _Word
    incarnation: _Word

    def ticket(self) -> LeaseWord:
        """Return it in the form of the transport."""
        return LeaseWord(self.slot, self.generation, self.incarnation)


class Offer(msgspec.Struct, frozen=True):
    """Blocks of one prompt that a producer keeps for a consumer.

    Attributes:
        remote_engine_id, remote_request_id: the engine that keeps them, and their name there.
        remote_host, remote_port: address of its control channel.
        remote_block_ids: block ids by position per group; 0 where it no longer holds any; for a state
            group the one block with the snapshot.
        remote_num_tokens: tokens offered, from the start of the prompt.
        remote_lease: the ticket of the lease.
        remote_digest: `keys.prompt_digest` of these tokens.
        tp_size, pp_size: the producer's parallel sizes, for routers.
        remote_items, remote_adapter: as in `engines.vllm.prompt.PromptContent`.
    """

    remote_engine_id: str
    remote_request_id: str
    remote_host: Host
    remote_port: Port
    remote_block_ids: list[list[_BlockId]]
    remote_num_tokens: _Count
    remote_lease: Lease
    remote_digest: str
    tp_size: int = 1
    pp_size: int = 1
    remote_items: str = ""
    remote_adapter: str = ""


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
        offer = msgspec.convert(params, Offer)
        # JSON can name half of a surrogate pair, which no log line, message or digest can hold.
        "".join(text for text in msgspec.structs.astuple(offer) if isinstance(text, str)).encode()
    except UnicodeError as error:
        raise ProtocolError("kv_transfer_params: text that is not Unicode") from error
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error
    return offer


def not_of_prompt(offer: Offer, request: Any, adapters: Adapters) -> str | None:
    """Return why an offer cannot belong to the request it came with; None if it does.

    Raises:
        NotYetNamed: the request's LoRA adapter is being read; ask again.
    """
    if not 0 < offer.remote_num_tokens <= request.num_prompt_tokens:
        return f"{offer.remote_num_tokens} tokens are offered for a prompt of {request.num_prompt_tokens}"
    if request.prompt_token_ids is None:
        return "the prompt is not made of token ids"
    offered = PromptContent(offer.remote_digest, offer.remote_items, offer.remote_adapter)
    try:
        return content_of(request, offer.remote_num_tokens, adapters).difference(offered)
    except NotYetNamed:
        raise
    except Unnameable as error:
        return f"the content of this prompt has no certain name: {error}"


def not_of_peer(offer: Offer, peer: Known) -> str | None:
    """Return why an offer cannot be of the peer at its address; None if it is."""
    if peer.facts.engine_id != offer.remote_engine_id:
        return f"engine {peer.facts.engine_id} answers at the address of {offer.remote_engine_id}"
    if peer.facts.incarnation != offer.remote_lease.incarnation:
        return "the engine has been restarted since it made the offer"
    offered, groups = len(offer.remote_block_ids), len(peer.ranks[0].geometry.groups)
    if offered != groups:
        return f"block tables for {offered} groups, the peer has {groups}"
    return None


def write_offer(offer: Offer) -> dict[str, Any]:
    """Return an offer as ``kv_transfer_params`` of the response."""
    params: dict[str, Any] = msgspec.to_builtins(offer)
    return {"do_remote_prefill": True, "do_remote_decode": False, **params}


def write_nothing() -> dict[str, Any]:
    """Return ``kv_transfer_params`` without an offer: the decode engine computes the prompt itself."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}
