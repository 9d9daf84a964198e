"""Forecast of a handover: the transfer of one request's KV cache between two hypothetical engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.geometry import GroupKind, RankGeometry
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.plan.cost import Pricing
from kvferry.plan.moved import TransferEstimate, TransferTotals
from kvferry.plan.setting import PlannedTransfer, set_up
from kvferry.plan.side import EngineSide, block_tokens
from kvferry.planning.select import needed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForecast:
    """The forecast for all layers with equal caches.

    Attributes:
        store: cache of each of these layers, over all ranks.
        layers: number of layers.
        tables: number of block tables of these layers at the destination.
        tokens: number of tokens of the prompt that are transferred; for recurrent state, the position of the
            snapshot.
        page_bytes, to_page_bytes: content bytes of the largest page (one block in one layer on one rank), at
            the source and at the destination.
        moved: transfer of all these layers.
    """

    store: LayerCache
    layers: int
    tables: int
    tokens: int
    page_bytes: int
    to_page_bytes: int
    moved: TransferEstimate

    @property
    def is_state(self) -> bool:
        """True if the layers cache recurrent state instead of tokens."""
        return self.store.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast for the handover of one request.

    Attributes:
        model: name of the model.
        source, destination: settings of both engines.
        blocks: number of tokens per block at the source and at the destination.
        tokens: length of the prompt in tokens.
        rows: forecast for each kind of layer.
        whole: transfer of all layers.
        notes: assumptions and choices that were made, one sentence each.
    """

    model: str
    source: EngineSide
    destination: EngineSide
    blocks: tuple[int, int]
    tokens: int
    rows: tuple[LayerForecast, ...]
    whole: TransferEstimate
    notes: tuple[str, ...]

    @property
    def token_bytes(self) -> int:
        """KV cache bytes per token over all layers. Copies on several ranks count once."""
        return sum(row.layers * row.store.bytes_of(1) for row in self.rows if not row.is_state)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state per sequence over all layers. Copies on several ranks count once."""
        return sum(row.layers * row.store.whole_bytes for row in self.rows if row.is_state)


def forecast(
    reading: ModelReading,
    sides: tuple[EngineSide, EngineSide],
    tokens: int,
    pricing: Pricing,
    *,
    separate: bool = False,
) -> Forecast:
    """Return the forecast for the handover of a prompt from one engine to another.

    Args:
        reading: caches of the model's layers.
        sides: settings of the source and of the destination.
        tokens: length of the prompt in tokens.
        pricing: costs, and the strategy to use if one is required.
        separate: True if K and V are separate pages on both sides, False if a page holds both.

    Raises:
        KVFerryError: an engine cannot have these settings, or the two cannot exchange this model's cache.
    """
    setting = set_up(reading, sides, tokens, separate=separate)
    sums = [TransferTotals() for _ in setting.kinds]
    for number, dst in enumerate(setting.dsts):
        for route in (route for template in setting.templates(number) for route in template.routes):
            group = dst.groups[route.dst_group]
            cells = setting.cells(route, group.kind, group.attention_span)
            full = setting.cells(route, _without_window(group.kind), 0)
            sums[setting.dst_rows[route.dst_group]].add(number, route, cells, full, pricing)
    counts = Counter(reading.cache.layers)
    full_bytes = _full_bytes(reading, setting.kinds, [each.full_bytes for each in sums], counts)
    rows = tuple(
        _row(setting, number, counts[kind], sums[number].moved(full_bytes[number]))
        for number, kind in enumerate(setting.kinds)
    )
    whole = TransferTotals.of(sums).moved(None if None in full_bytes else sum(filter(None, full_bytes)))
    sizes = [block_tokens(reading, side) for side in sides]
    notes = dict.fromkeys([*reading.notes, *(why for _, why in sizes if why)])
    blocks = (sizes[0][0], sizes[1][0])
    return Forecast(
        model=reading.cache.name,
        source=sides[0],
        destination=sides[1],
        blocks=blocks,
        tokens=tokens,
        rows=rows,
        whole=whole,
        notes=tuple(notes),
    )


def _row(setting: PlannedTransfer, number: int, layers: int, moved: TransferEstimate) -> LayerForecast:
    store = setting.kinds[number]
    low, high = needed_tokens(store.kind, store.attention_span, setting.span)
    here, there = (
        [n for n, row in enumerate(rows) if row == number] for rows in (setting.src_rows, setting.dst_rows)
    )
    return LayerForecast(
        store=store,
        layers=layers,
        tables=len(there),
        tokens=high - low,
        page_bytes=_page_bytes(setting.srcs, here),
        to_page_bytes=_page_bytes(setting.dsts, there),
        moved=moved,
    )


def _without_window(kind: GroupKind) -> GroupKind:
    return GroupKind.FULL if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else kind


def _page_bytes(ranks: Sequence[RankGeometry], groups: Sequence[int]) -> int:
    """Return the content bytes of the largest page in the groups with these indices; 0 without pages.

    Args:
        ranks: geometry of all ranks of an engine.
        groups: indices of groups.
    """
    pages = [layer.page for rank in ranks for number in groups for layer in rank.groups[number].layers[:1]]
    return max((page.content_bytes for page in pages), default=0)


def _full_bytes(
    reading: ModelReading,
    kinds: Sequence[LayerCache],
    totals: Sequence[int],
    counts: Mapping[LayerCache, int],
) -> list[int | None]:
    """Return the bytes that would be transferred for each kind of layer if all layers were full attention.

    A layer that caches only recurrent state counts as much as the attention layer with the most bytes. State
    in a layer that also has attention counts as 0. If the model has no attention, the result for state is
    None.

    Args:
        reading: caches of the model's layers.
        kinds: kinds of layers.
        totals: for each kind, the bytes that would be transferred if its attention were full attention.
        counts: number of layers of each kind.
    """
    attention = [
        total / counts[kind]
        for kind, total in zip(kinds, totals, strict=True)
        if kind.kind is not GroupKind.STATE
    ]
    alone = Counter[LayerCache]()
    for stores in per_layer(reading):
        if all(store.kind is GroupKind.STATE for store in stores):
            alone.update(stores)
    return [
        total
        if kind.kind is not GroupKind.STATE
        else round(max(attention) * alone[kind])
        if attention
        else None
        for kind, total in zip(kinds, totals, strict=True)
    ]
