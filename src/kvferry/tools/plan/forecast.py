"""Forecast of a handover between two hypothetical engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.geometry import Attention, GroupKind, RankGeometry
from kvferry.geometry.models import ModelReading, per_layer
from kvferry.geometry.store import LayerCache
from kvferry.planning.select import needed_tokens
from kvferry.tools.plan.contents import layer_pages, notes_of
from kvferry.tools.plan.cost import Pricing, TransferEstimate
from kvferry.tools.plan.setting import PlannedTransfer, set_up
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
        estimate: expected transfer of all these layers together.
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
class Handover:
    """The transfer of one request's KV from one engine to another.

    Attributes:
        model: name of the model.
        source, destination: settings of the engine that has the KV, and of the engine that reads it.
        blocks: number of tokens per block at the source, and at the destination.
        tokens: length of the prompt in tokens.
        notes: assumptions, one sentence each.
    """

    model: str
    source: EngineSide
    destination: EngineSide
    blocks: tuple[int, int]
    tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Handover):
    """The forecast of a handover.

    Attributes:
        rows: forecast for each kind of layer.
        whole: expected transfer of all layers together.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedTransfer(Handover):
    """A handover that kvferry's connector refuses, so that the destination computes the prompt.

    Attributes:
        reasons: what prevents the transfer, one sentence each.
    """

    reasons: tuple[str, ...]


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

    Raises:
        Incompatible: the engines cannot exchange this model's KV.
        KVFerryError: an engine cannot have these settings.
    """
    setting = set_up(reading, sides, tokens, separate=separate)
    sums = [TransferEstimate() for _ in setting.kinds]
    for number, dst in enumerate(setting.dsts):
        for route in (route for template in setting.templates(number) for route in template.routes):
            group = dst.groups[route.dst_group]
            cells = setting.cells(route, group)
            # What the same layers would transfer without windows.
            full = setting.cells(route, Attention(_without_window(group.kind)))
            sums[setting.dst_rows[route.dst_group]].add(number, route, cells, full, pricing)
    counts = Counter(reading.cache.layers)
    full_bytes = _full_bytes(reading, setting.kinds, [each.full_bytes or 0 for each in sums], counts)
    for each, size in zip(sums, full_bytes, strict=True):
        each.full_bytes = size
    rows = tuple(
        _row(setting, number, counts[kind], sums[number]) for number, kind in enumerate(setting.kinds)
    )
    return Forecast(
        model=reading.cache.name,
        source=sides[0],
        destination=sides[1],
        blocks=_block_tokens(reading, sides),
        tokens=tokens,
        rows=rows,
        whole=TransferEstimate.of(sums),
        notes=_notes(reading, sides),
    )


def refusal(
    reading: ModelReading, sides: tuple[EngineSide, EngineSide], tokens: int, reasons: Sequence[str]
) -> RefusedTransfer:
    """Return a description of a handover that kvferry's connector refuses for these reasons."""
    return RefusedTransfer(
        model=reading.cache.name,
        source=sides[0],
        destination=sides[1],
        blocks=_block_tokens(reading, sides),
        tokens=tokens,
        reasons=tuple(reasons),
        notes=_notes(reading, sides),
    )


def _block_tokens(reading: ModelReading, sides: tuple[EngineSide, EngineSide]) -> tuple[int, int]:
    return block_tokens(reading, sides[0])[0], block_tokens(reading, sides[1])[0]


def _notes(reading: ModelReading, sides: tuple[EngineSide, EngineSide]) -> tuple[str, ...]:
    """Return the assumptions of a forecast, one sentence each: of the model, of blocks, and of pages."""
    blocks = [why for side in sides if (why := block_tokens(reading, side)[1])]
    pages = [note for side in sides for note in notes_of(layer_pages(reading, side))]
    return tuple(dict.fromkeys([*reading.notes, *blocks, *pages]))


def _row(setting: PlannedTransfer, number: int, layers: int, estimate: TransferEstimate) -> LayerForecast:
    cache = setting.kinds[number]
    low, high = needed_tokens(cache, setting.span)
    here, there = (
        [n for n, row in enumerate(rows) if row == number] for rows in (setting.src_rows, setting.dst_rows)
    )
    return LayerForecast(
        cache=cache,
        layers=layers,
        tables=len(there),
        tokens=high - low,
        page_bytes=_page_bytes(setting.srcs, here),
        to_page_bytes=_page_bytes(setting.dsts, there),
        whole=_moves_whole(setting.dsts, there),
        estimate=estimate,
    )


def _without_window(kind: GroupKind) -> GroupKind:
    return GroupKind.FULL if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else kind


def _page_bytes(ranks: Sequence[RankGeometry], groups: Sequence[int]) -> int:
    """Return the size of the largest page in several groups, without padding; 0 if they have no layers."""
    pages = [layer.page for rank in ranks for number in groups for layer in rank.groups[number].layers[:1]]
    return max((page.content_bytes for page in pages), default=0)


def _moves_whole(ranks: Sequence[RankGeometry], groups: Sequence[int]) -> bool:
    return any(
        layer.page.opaque for rank in ranks for number in groups for layer in rank.groups[number].layers
    )


def _full_bytes(
    reading: ModelReading,
    kinds: Sequence[LayerCache],
    totals: Sequence[int],
    counts: Mapping[LayerCache, int],
) -> list[int | None]:
    """Return the bytes that would be transferred for each kind of layer if all layers had full attention.

    None for recurrent state if the model has no attention layers.

    Args:
        totals: bytes of each kind if its window is replaced by full attention; unused for recurrent state.
        counts: number of layers of each kind.
    """
    attention = [
        total / counts[kind]
        for kind, total in zip(kinds, totals, strict=True)
        if kind.kind is not GroupKind.STATE
    ]
    # A layer that has only recurrent state counts as the largest attention layer. State beside attention
    # counts nothing, because the attention would be there anyway.
    alone = Counter[LayerCache]()
    for caches in per_layer(reading):
        if all(cache.kind is GroupKind.STATE for cache in caches):
            alone.update(caches)
    return [
        total
        if kind.kind is not GroupKind.STATE
        else round(max(attention) * alone[kind])
        if attention
        else None
        for kind, total in zip(kinds, totals, strict=True)
    ]
