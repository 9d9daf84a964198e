"""Forecast of a handover between two hypothetical engines: bytes, descriptors, strategies and seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Self

from kvferry.common.errors import ConfigError, Incompatible
from kvferry.geometry import Attention, GroupKind, PageFormat
from kvferry.planning import (
    Cells,
    Costs,
    Route,
    Strategy,
    TransferMethod,
    choose_method,
    count_transfer,
    needed_tokens,
    segment_bytes,
    transfer_methods,
)
from kvferry.tools.models import ModelReading, per_layer
from kvferry.tools.models.store import LayerCache
from kvferry.tools.plan.contents import layer_pages, notes_of
from kvferry.tools.plan.setting import EngineMemory, PlannedTransfer, set_up
from kvferry.tools.plan.side import EngineSide, block_tokens
from kvferry.transport import TransferSettings

# Stands for the cheapest strategy.
AUTO = "auto"
# Stands for the strategies of a transfer whose routes use several.
MIXED = "mixed"

# Largest packed cell that workers can handle with default settings.
_ROOM_BYTES = TransferSettings().staging_bytes // 4


@dataclass(frozen=True, slots=True)
class Pricing:
    """The costs of transfer work that a forecast assumes, and the strategy; None for the cheapest."""

    costs: Costs
    strategy: Strategy | None = None
    one_machine: bool = False

    def method(self, route: Route, cells: int) -> TransferMethod:
        shared = self.one_machine or self.strategy is Strategy.SHARED
        found = transfer_methods(route, self.costs, _ROOM_BYTES, shared=shared)
        return found[choose_method(found, cells, self.costs, self.strategy)]


def limit_bandwidth(costs: Costs, gigabytes_per_second: float | None) -> Costs:
    """Return the costs of transfer work if a network link limits the bandwidth; None for no limit."""
    if gigabytes_per_second is None:
        return costs
    if not 0 < gigabytes_per_second < float("inf"):
        raise ConfigError(f"bandwidth is {gigabytes_per_second} GB/s, it must be above 0")
    seconds = max(costs.read_byte_seconds, 1 / (gigabytes_per_second * 1e9))
    # All lanes share the link, so more lanes do not transfer more bytes.
    return replace(costs, read_byte_seconds=seconds, lanes_byte_gain=1.0)


def parse_strategy(name: str) -> Strategy | None:
    """Return the strategy with this name; None for `AUTO`."""
    if name == AUTO:
        return None
    try:
        return Strategy(name)
    except ValueError:
        raise ConfigError(
            f"strategy {name!r} is not known; choose one of {AUTO}, {', '.join(Strategy)}"
        ) from None


@dataclass(slots=True)
class TransferEstimate:
    """The expected transfer of a prompt's KV, for one kind of layer or for all layers.

    Attributes:
        pages: number of pages that are written at the destination, over all ranks.
        descriptors: number of runs, after adjacent runs of consecutive cells are merged.
        bytes: bytes that all ranks of the destination need, without those that are read and discarded.
        full_bytes: value that `bytes` would have if all layers had full attention; None if the model has no
            attention layers.
        runs: number of bytes in runs of each length.
        read_descriptors, read_bytes: total number of descriptors, and of bytes, of all READs.
    """

    pages: int = 0
    descriptors: int = 0
    bytes: int = 0
    full_bytes: int | None = 0
    runs: Counter[int] = field(default_factory=Counter)
    strategies: set[Strategy] = field(default_factory=set)
    read_descriptors: int = 0
    read_bytes: int = 0
    rank_seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def run_bytes(self) -> int:
        """Weighted median of the run length: half of all bytes are in runs of this length or longer runs."""
        half, seen = self.runs.total() / 2, 0
        for length in sorted(+self.runs, reverse=True):
            seen += self.runs[length]
            if seen >= half:
                return length
        return 0

    @property
    def block_run_bytes(self) -> int:
        return max(+self.runs, default=0)

    @property
    def strategy(self) -> str:
        strategies = self.strategies or {Strategy.DIRECT}
        return next(iter(strategies)).value if len(strategies) == 1 else MIXED

    @property
    def seconds(self) -> float:
        """Expected duration on the slowest rank."""
        return max(self.rank_seconds.values(), default=0.0)

    def add(self, rank: int, route: Route, cells: Cells, full: Cells, pricing: Pricing) -> None:
        """Add a route to a destination rank. `full` are its cells if its layers had full attention."""
        counted = count_transfer(route, cells)
        self.pages += len(route.layers) * len(set(cells.dst_block.tolist()))
        self.descriptors += counted.descriptors
        self.bytes += counted.bytes
        self.full_bytes = (self.full_bytes or 0) + count_transfer(route, full).bytes
        for kind in route.run_kinds:
            self.runs[kind.length] += kind.length * kind.number * len(cells)
        if not len(cells):
            return
        method = pricing.method(route, len(cells))
        read_bytes = round(method.work.read_bytes * len(cells))
        descriptors = counted.descriptors
        if method.strategy is not Strategy.DIRECT:
            # Images that are read whole need one descriptor per segment.
            segments = read_bytes / segment_bytes(read_bytes)
            descriptors = ceil(method.work.descriptors * len(cells)) or ceil(segments)
        self.strategies.add(method.strategy)
        self.read_descriptors += descriptors
        self.read_bytes += read_bytes
        self.rank_seconds[rank] += method.work.seconds(len(cells), pricing.costs)

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        whole = cls()
        for part in parts:
            whole.pages += part.pages
            whole.descriptors += part.descriptors
            whole.bytes += part.bytes
            known = None not in (whole.full_bytes, part.full_bytes)
            whole.full_bytes = (whole.full_bytes or 0) + (part.full_bytes or 0) if known else None
            whole.runs.update(part.runs)
            whole.strategies |= part.strategies
            whole.read_descriptors += part.read_descriptors
            whole.read_bytes += part.read_bytes
            # A rank reads its routes one after the other.
            for rank, seconds in part.rank_seconds.items():
                whole.rank_seconds[rank] += seconds
        return whole


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
        blocks: tokens per block at the source, and at the destination.
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

    K and V are on `separate` pages in both engines, or a page holds both.
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
            windowed = group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
            full = setting.cells(route, Attention(GroupKind.FULL if windowed else group.kind))
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
    return [
        layer.page
        for rank in memory.ranks
        for group, own in zip(rank.groups, memory.kinds, strict=True)
        if own == kind
        for layer in group.layers
    ]
