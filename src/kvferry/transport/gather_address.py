"""Addresses of a peer's gather channels, if this engine may dial them."""

from __future__ import annotations

import msgspec

from kvferry.limited_log import LimitedLog
from kvferry.terminal import shown
from kvferry.transport.handshake import Address
from kvferry.transport.messages import RankCard
from kvferry.transport.resolver import AddressNotAllowed, PeerResolver


def resolve_gather_address(
    card: RankCard, address: Address, names: PeerResolver, log: LimitedLog
) -> RankCard:
    """Return a copy of the card with the numeric address of its gather channel, or without it if not allowed.

    Workers dial the address in the card, so they never resolve a name.

    Args:
        card: the peer's description of one of its ranks.
        address: address of the peer's control channel.
        names: decides which address may be dialled.
        log: gets a line if the address may not be dialled.
    """
    if card.outgoing is None:
        return card
    try:
        place = names.resolve(card.outgoing.host)
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
        return msgspec.structs.replace(card, outgoing=None)
    return msgspec.structs.replace(card, outgoing=msgspec.structs.replace(card.outgoing, host=place))
