"""Resolve the addresses of a peer's gather channels, if this engine may connect to them.

A reader asks a worker over its gather channel to pack cells into staging memory.
"""

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
    """Return a copy of a rank's description in which the host of the gather channel is an IP address.

    Over the gather channel, readers ask the rank to pack cells (parts of blocks) into staging memory. The
    workers that connect to the channel never resolve names. If the host is not allowed or not resolved yet,
    the copy has no gather channel: its `outgoing` is None.

    Args:
        card: peer's description of one of its ranks.
        address: (host, port) of the peer's control channel, for the log.
        names: resolver of host names, which also decides which hosts are allowed.
        log: log that receives a line if the copy has no gather channel.
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
