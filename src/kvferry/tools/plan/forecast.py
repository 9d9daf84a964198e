"""Forecast of a handover between two hypothetical engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.common.errors import Incompatible
from kvferry.geometry import Attention, GroupKind, PageFormat
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.planning.select import needed_tokens
from kvferry.tools.plan.contents import layer_pages, notes_of
from kvferry.tools.plan.cost import Pricing, TransferEstimate
from kvferry.tools.plan.setting import EngineMemory, PlannedTransfer, set_up
from kvferry.tools.plan.side import EngineSide, block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForecast:
    """The forecast of transferring a prompt's KV for one kind of layer: all layers with equal `LayerCache`.

    Attributes:
        tables: number of block tables of these layers at the destination.
        tokens: number of tokens of the prompt that are transferred; for recurrent state, the position of the
            transferred state.
        page_bytes, to_page_bytes: size of the largest page at the source and at the destination, without
            padding.
        whole: True if pages of these layers have unknown content and move whole.
    """

    cache: LayerCache
    layers: int
    tables: int
    tokens: int
    page_bytes: int
    to_page_bytes: int
    whole: bool
    estimate: TransferEstimate

    @property
    def is_state(self) -> bool:
        return self.cache.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of moving one request's KV from one engine to another.

    Attributes:
        source, destination: settings of the engine that has the KV, and of the engine that reads it.
        blocks: number of tokens per block at the source, and at the destination.
        notes: assumptions, one sentence each.
        refused: why kvferry's connector refuses the transfer, one sentence each. The destination then
            computes the prompt. Empty if it transfers the KV.
        rows: forecast for each kind of layer; empty if the transfer is refused.
    """

    model: str
    source: EngineSide
    destination: EngineSide
    blocks: tuple[int, int]
    tokens: int
    notes: tuple[str, ...]
    refused: tuple[str, ...]
    rows: tuple[LayerForecast, ...]
    whole: TransferEstimate

    @property
    def token_bytes(self) -> int:
        """Number of KV cache bytes per token, over all layers. KV that several ranks hold counts once."""
        return sum(row.layers * row.cache.bytes_of(1) for row in self.rows if not row.is_state)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state per sequence, over all layers. Copies on several ranks count once."""
        return sum(row.layers * row.cache.whole_bytes for row in self.rows if row.is_state)


def forecast(
    reading: ModelReading,
    sides: tuple[EngineSide, EngineSide],
    tokens: int,
    pricing: Pricing,
    *,
    separate: bool = False,
) -> Forecast:
    """Forecast the handover of a prompt's KV from the first engine to the second.

    Args:
        separate: True if K and V are on separate pages in both engines, False if a page holds both.
    """
    rows, refused = tuple[LayerForecast, ...](), tuple[str, ...]()
    try:
        rows = _forecast_layers(reading, set_up(reading, sides, tokens, separate=separate), pricing)
    except Incompatible as error:
        refused = tuple(error.differences)
    blocks = [block_tokens(reading, side) for side in sides]
    pages = [note for side in sides for note in notes_of(layer_pages(reading, side))]
    return Forecast(
        model=reading.cache.name,
        source=sides[0],
        destination=sides[1],
        blocks=(blocks[0][0], blocks[1][0]),
        tokens=tokens,
        notes=tuple(dict.fromkeys([*reading.notes, *(why for _, why in blocks if why), *pages])),
        refused=refused,
        rows=rows,
        whole=TransferEstimate.of(row.estimate for row in rows),
    )


def _forecast_layers(
    reading: ModelReading, setting: PlannedTransfer, pricing: Pricing
) -> tuple[LayerForecast, ...]:
    """Return the forecast for each kind of layer. Raise Incompatible if the engines cannot exchange KV."""
    estimates = [TransferEstimate() for _ in setting.kinds]
    for number, dst in enumerate(setting.dst.ranks):
        for route in (route for template in setting.templates(number) for route in template.routes):
            group = dst.groups[route.dst_group]
            cells = setting.cells(route, group)
            # What the same layers would transfer without windows.
            full = setting.cells(route, Attention(_without_window(group.kind)))
            estimates[setting.dst.kinds[route.dst_group]].add(number, route, cells, full, pricing)
    counts = Counter(reading.cache.layers)
    _compare_state(reading, dict(zip(setting.kinds, estimates, strict=True)), counts)
    rows = []
    for number, (cache, estimate) in enumerate(zip(setting.kinds, estimates, strict=True)):
        low, high = needed_tokens(cache, setting.span)
        src_pages, dst_pages = _pages(setting.src, number), _pages(setting.dst, number)
        row = LayerForecast(
            cache=cache,
            layers=counts[cache],
            tables=setting.dst.kinds.count(number),
            tokens=high - low,
            page_bytes=max((page.content_bytes for page in src_pages), default=0),
            to_page_bytes=max((page.content_bytes for page in dst_pages), default=0),
            whole=any(page.opaque for page in dst_pages),
            estimate=estimate,
        )
        rows.append(row)
    return tuple(rows)


def _without_window(kind: GroupKind) -> GroupKind:
    return GroupKind.FULL if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else kind


def _compare_state(
    reading: ModelReading, estimates: dict[LayerCache, TransferEstimate], counts: Counter[LayerCache]
) -> None:
    """Set the bytes that full attention in place of recurrent state would transfer."""
    attention = [
        (each.full_bytes or 0) / counts[cache]
        for cache, each in estimates.items()
        if cache.kind is not GroupKind.STATE
    ]
    # A layer that has only recurrent state counts as the largest attention layer. State beside attention
    # counts nothing, because the attention would be there anyway.
    alone = Counter[LayerCache]()
    for caches in per_layer(reading):
        if all(cache.kind is GroupKind.STATE for cache in caches):
            alone.update(caches)
    for cache, each in estimates.items():
        if cache.kind is GroupKind.STATE:
            each.full_bytes = round(max(attention) * alone[cache]) if attention else None


def _pages(memory: EngineMemory, kind: int) -> list[PageFormat]:
    """Return the page of every layer of one kind, on every rank."""
    return [
        layer.page
        for rank in memory.ranks
        for group, own in zip(rank.groups, memory.kinds, strict=True)
        if own == kind
        for layer in group.layers
    ]
