"""What one long request costs the decode side before its first byte moves.

Planning works on block ids, rows and strides; how long a page is does not enter into it. So the request is
planned for real, against a real peer, on the same number of blocks and layers with pages so small that they
fit in memory, and NIXL makes a transfer of exactly those descriptors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from kvferry.bench.movers import RawReads
from kvferry.bench.reader import Reader
from kvferry.bench.shapes import Shape, block_table
from kvferry.bench.stats import Spread
from kvferry.bench.steps import as_array
from kvferry.planning.select import Span
from kvferry.transport.peer import ReadOrder


@dataclass(frozen=True, slots=True)
class Planning:
    """Seconds per request.

    Attributes:
        tokens, blocks, layers: of the request.
        tables: block tables from lists of numbers to arrays, both sides.
        plan: everything from there to the index arrays: cells, checks of ids, counts, indices.
        ours: `tables` and `plan` together.
        nixl: making a transfer of those descriptors.
    """

    tokens: int
    blocks: int
    layers: int
    tables: Spread
    plan: Spread
    ours: Spread
    nixl: Spread


def measure(
    shape: Shape, tokens: int, repeats: int, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Planning:
    """Plan one request of `tokens` tokens, both sides scattered, `repeats` times.

    Raises:
        ConfigError, TransferError: as `Reader`.
    """
    progress(f"planning {tokens:,} tokens")
    blocks = shape.blocks(tokens)
    src, dst = block_table(blocks, "scattered", 1), block_table(blocks, "scattered", 2)
    tables, plan, nixl = [], [], []
    with Reader(shape.with_small_pages(), blocks + 1, settings) as reader, closing(RawReads(reader)) as raw:
        lists = raw.same(tokens, src, dst)
        src_list, dst_list = src.tolist(), dst.tolist()
        ticket = reader.producer.grant("planning")
        for _ in range(repeats + 1):
            started = time.perf_counter()
            arrays = (as_array(src_list),), (as_array(dst_list),)
            tables.append(time.perf_counter() - started)
            plan.append(
                raw.plan_only(ReadOrder("planning", "", Span(0, tokens, tokens + 1), *arrays, ticket))
            )
            nixl.append(raw.make_only(lists))
    # The first of each does not count: it touches memory for the first time.
    del tables[0], plan[0], nixl[0]
    ours = [a + b for a, b in zip(tables, plan, strict=True)]
    return Planning(
        tokens, blocks, shape.layers, Spread.of(tables), Spread.of(plan), Spread.of(ours), Spread.of(nixl)
    )
