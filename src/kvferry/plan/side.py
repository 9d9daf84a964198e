"""The shape of one engine, from its flags.

Missing flags take the values that vLLM 0.32 chooses on a CUDA machine. A block has 16 tokens. For models with
recurrent state a block is so large that an attention page holds a snapshot. The layout is the one that
kvferry's connector requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.geometry.layout import LAYOUTS, EngineShape, GroupShape, group_layers, split_stages
from kvferry.geometry.models import ModelReading
from kvferry.plan.blocks import base_tokens, block_sizes, group_counts

AUTO = "auto"
"""The name of the choice to take the engine's default layout."""
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The requested settings of one engine.

    Attributes:
        tp, pp: number of tensor-parallel and of pipeline ranks.
        layout: order of the axes in memory.
        block_tokens: tokens of a block; None for vLLM's choice.
    """

    tp: int = 1
    pp: int = 1
    layout: str = "LBNHC"
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        known = _ALIASES.get(self.layout.upper(), self.layout.upper())
        if known not in LAYOUTS:
            listed = ", ".join((AUTO, *LAYOUTS, *_ALIASES))
            raise ConfigError(f"layout {self.layout!r} is not known; choose one of {listed}")
        object.__setattr__(self, "layout", known)
        for name, value in (("tp", self.tp), ("pp", self.pp), ("block size", self.block_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, it must be at least 1")

    @property
    def label(self) -> str:
        """Description for people, without the block size."""
        parallel = [f"TP{self.tp}", *([f"PP{self.pp}"] if self.pp > 1 else [])]
        return f"{' '.join(parallel)} {self.layout}"


def layout_of(name: str, reading: ModelReading) -> str:
    """Return the layout of that name; for `AUTO`, the default of an engine with kvferry's connector.

    The default has blocks outermost if vLLM supports that. MLA backends do not declare it and keep vLLM's
    LBNHC, except for compressed latents (DeepSeek V4), which need blocks outermost. If layers differ, layouts
    with heads outside of layers are impossible.
    """
    if name.lower() != AUTO:
        return name
    kinds = set(reading.cache.layers)
    if any(store.state_tokens > 1 for store in kinds):
        return "BLHNC"
    if any(store.kind is GroupKind.MLA for store in kinds):
        return "LBNHC"
    return "BLHNC" if len(kinds) > 1 else "BHLNC"


def block_tokens(reading: ModelReading, side: EngineSide) -> tuple[int, str]:
    """Return the tokens of a block of most layers, and the reason in words; empty for the ordinary size.

    Raises:
        GeometryError: the ranks can neither share nor copy the heads evenly.
    """
    tokens, why = base_tokens(reading.cache.layers, side.tp, side.block_tokens)
    _, more = block_sizes(reading.cache.layers, side.tp, side.layout, tokens)
    return tokens, "; ".join(filter(None, (why, more)))


def shape(reading: ModelReading, side: EngineSide, num_blocks: int) -> EngineShape:
    """Return the engine's shape, with `num_blocks` blocks in each rank's pool.

    Raises:
        GeometryError: there are more pipeline ranks than layers, or the tensor-parallel ranks can neither
            share nor copy the heads evenly.
    """
    layers = reading.cache.layers
    tokens, _ = base_tokens(layers, side.tp, side.block_tokens)
    sizes, _ = block_sizes(layers, side.tp, side.layout, tokens)
    counts = group_counts(layers, side.tp, side.layout, sizes)
    groups = tuple(GroupShape(each, sizes[layers[each[0]]]) for each in group_layers(reading.cache, counts))
    return EngineShape(side.tp, _stages(reading, side.pp), tokens, side.layout, num_blocks, groups=groups)


def _stages(reading: ModelReading, pp: int) -> tuple[int, ...]:
    """Return the number of layers that keep something, per pipeline rank. Ranks share out all layers."""
    cuts = [0, *accumulate(split_stages(len(reading.kept), pp))]
    stages = [sum(reading.kept[first:last]) for first, last in pairwise(cuts)]
    if min(stages) < 1:
        raise ConfigError(
            f"with pp {pp} a pipeline rank has no layer that keeps anything; choose fewer ranks"
        )
    return tuple(stages)
