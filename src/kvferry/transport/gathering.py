"""Addresses of a peer's gather channels, if this engine may dial them."""

from __future__ import annotations

import logging

import msgspec

from kvferry.terminal import shown
from kvferry.transport.handshake import Address
from kvferry.transport.messages import RankCard
from kvferry.transport.names import Names, NotAllowed

logger = logging.getLogger(__name__)


def gathering(card: RankCard, address: Address, names: Names) -> RankCard:
    """Return a rank with the numeric address of its gather channel, or without one that may not be dialled.

    Workers dial what stands in a card, so a name is not resolved again there.

    Args:
        card: what a peer says of one of its ranks.
        address: of the peer's control channel.
        names: decides.
    """
    if card.outgoing is None:
        return card
    try:
        place = names.place(card.outgoing.host)
        why = "its name is not resolved yet"
    except NotAllowed as error:
        place, why = None, str(error)
    if place is None:
        logger.warning(
            "peer at %s:%d: rank TP%d PP%d gathers at %s, which is not dialled, so it is read without: %s",
            *address, card.geometry.tp_rank, card.geometry.pp_rank, shown(card.outgoing.host), shown(why),
        )  # fmt: skip
        return msgspec.structs.replace(card, outgoing=None)
    return msgspec.structs.replace(card, outgoing=msgspec.structs.replace(card.outgoing, host=place))
