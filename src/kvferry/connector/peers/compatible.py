"""Check that this engine can read the KV of a peer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvferry.errors import Incompatible
from kvferry.planning.template import absent_layer_names, window_mismatches
from kvferry.transport.messages import RankCard
from kvferry.units import counted

logger = logging.getLogger(__name__)


def check_readable(theirs: Sequence[RankCard], ours: Sequence[RankCard]) -> None:
    """Check that each rank of this engine can read all layers of its KV cache from the peer's ranks.

    If layers of a draft model are missing at the peer, log a warning.

    Args:
        theirs: cards (descriptions with the KV cache geometry) of the peer's ranks.
        ours: cards of this engine's ranks.

    Raises:
        Incompatible: a rank cannot read a layer, or the peer keeps fewer tokens of a layer than a rank needs
            (a shorter attention window). The message names every difference.
    """
    peer, here = ([card.geometry for card in cards] for cards in (theirs, ours))
    absent = absent_layer_names(peer, here)
    if found := [text for rank in here for text in window_mismatches(peer, rank)]:
        raise Incompatible(list(dict.fromkeys(found)))
    if absent:
        logger.warning(
            "the peer does not keep %s of our draft model, %s for one: prompts from there are "
            "loaded without them, and fewer drafts are accepted; run both with the same draft model if that "
            "matters", counted(len(absent), "layer"), absent[0],
        )  # fmt: skip
