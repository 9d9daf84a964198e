"""Bytes that change on the way from a peer: when a READ has landed, and before anybody has looked at them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from kvferry.geometry import GroupKind
from kvferry.planning.select import blocks_needed, needed_tokens
from kvferry.transport.lane_connections import ConnectedPeer
from support.vllm_engine import pages, parts


def when_landed(lanes: list[Any], change: Callable[[Any], object]) -> None:
    """Call `change` with each order of these lanes that has landed, in the lane's thread."""
    # A lane must not verify its share while another lane still changes it.
    lock = threading.Lock()

    def alone(order: Any) -> None:
        with lock:
            change(order)

    for lane in lanes:
        lane._verify = partial(_landing, lane._verify, alone)


def _landing(inner: Any, change: Callable[[Any], object], read: Any, *, landed: bool) -> Any:
    if read.failure is None and not read.data_done:
        if not landed:
            return False  # a segment that has landed is verified when all have
        change(read.order)
    return inner(read, landed=landed)


def flip_bit(worker: Any, order: Any, draw: random.Random) -> str:
    """Flip a bit of what an order has read; return which. Empty if it has read nothing."""
    groups = list(enumerate(worker.geometry.groups))
    draw.shuffle(groups)
    for number, group in groups:
        low, high = needed_tokens(group, order.span)
        if low >= high or not group.layers:
            continue
        layer = draw.choice(group.layers)
        field = draw.choice(layer.page.fields)
        token, table = draw.randrange(low, high), order.dst_tables[number]
        offsets = pages._offsets(field)
        state = group.kind is GroupKind.STATE
        block = int(table[0] if state else table[token // group.block_tokens])
        per = 1 if state else group.block_tokens // len(offsets)
        row = offsets[0 if state else token % group.block_tokens // per]
        at = int(draw.choice(row.tolist())) + draw.randrange(field.item_bytes)
        pages._page(worker, layer, block)[at] ^= np.uint8(1 << draw.randrange(8))
        return f"a bit of {field.name} of {layer.name}, token {token}"
    return ""


def flip_signs(worker: Any, order: Any, group: int, last: int = 1) -> str:
    """Flip the signs of the `last` blocks that an order has read of a group; return which."""
    found = worker.geometry.groups[group]
    ids = blocks_needed(found, order.span, order.dst_tables[group])
    for block in ids[-last:].tolist():
        for layer in found.layers:
            pages.negate(worker, layer, block)
    return f"the signs of the blocks {ids[-last:].tolist()}" if len(ids) else ""


@contextmanager
def unverified() -> Any:
    """Read from peers as without `verify_transfers`."""
    with mock.patch.object(ConnectedPeer, "_verifications", return_value=[]):
        yield


def spoil_on_the_way(engine: Any, group: int | None, *, verified: bool = True) -> None:
    """Flip the signs of the last block of this group in each order that lands from now on; None stops it.

    Without `verified`, the engine does not verify what it reads.
    """
    if not hasattr(engine, "on_the_way"):
        engine.on_the_way = {"group": None, "stack": ExitStack()}
        worker, state = parts.worker_half(engine), engine.on_the_way
        when_landed(
            parts.lanes(engine),
            lambda order: state["group"] is not None and flip_signs(worker, order, state["group"]),
        )
    engine.on_the_way["stack"].close()
    engine.on_the_way["group"] = group
    if not verified:
        engine.on_the_way["stack"].enter_context(unverified())
