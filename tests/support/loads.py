"""Loads, made without admission."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.connector.bids import Bid
from kvferry.connector.messages import Load, LoadPart
from kvferry.planning.select import LoadSpan
from kvferry.tiers.names import TIERS
from kvferry.transport.lease import LeaseWord
from kvferry.transport.read_plan import ReadOrder


def made_up_load(
    key: str,
    span: LoadSpan,
    tables: Sequence[Sequence[int]],
    *,
    request_id: str = "a",
    attempt: str | None = None,
    loads: int = 1,
    bid: Bid | None = None,
) -> Load:
    """Return a load with a deadline of 30 s, by default from the tiers."""
    return Load(
        key=key,
        request_id=request_id,
        attempt=key if attempt is None else attempt,
        loads=loads,
        bid=bid or Bid(TIERS, ()),
        span=span,
        tables=tuple(np.array(ids, np.int64) for ids in tables),
        timeout_seconds=30.0,
        began=0.0,
    )


def only_read(load: str) -> LoadPart:
    """The read of a load that has one part. Its order has the key of the load."""
    order = ReadOrder(load, "peer", LoadSpan(0, 4, 5), (), (), LeaseWord(0, 0, 1))
    return LoadPart(load, order, last=True)
