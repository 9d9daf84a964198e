"""The settings of one engine that decide its memory layout, from the flags of ``kvferry plan``.

Missing flags take the values that vLLM 0.32 chooses on a CUDA machine. A block usually has 16 tokens. For
models with recurrent state, a block has so many tokens that an attention page is at least as large as a
snapshot of that state. The default layout is the one that kvferry's connector requests.
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
"""Layout name that stands for the engine's default layout."""
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The requested settings of one engine.

    Attributes:
        tp, pp: number of tensor-parallel ranks, and of pipeline ranks.
        layout: order of the axes in memory: one of `LAYOUTS`, NHD or HND.
        block_tokens: number of tokens per block; None for vLLM's choice.
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
        """Short description for people, e.g. ``TP2 LBNHC``, without the block size."""
        parallel = [f"TP{self.tp}", *([f"PP{self.pp}"] if self.pp > 1 else [])]
        return f"{' '.join(parallel)} {self.layout}"


def layout_of(name: str, reading: ModelReading) -> str:
    """Return the layout called `name`; for `AUTO`, the default of an engine with kvferry's connector.

    The default has blocks outermost if vLLM supports that. MLA backends do not declare support, so their
    default is LBNHC, as in vLLM. Compressed latents (DeepSeek V4) require blocks outermost. If layers have
    different caches, heads cannot be outside of layers.

    Args:
        name: name of a layout, or `AUTO`. It is not checked.
        reading: caches of the model's layers.
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
    """Return the number of tokens per block in most layers, and the reason in words.

    The reason is empty if all layers have the requested or ordinary block size.

    Args:
        reading: caches of the model's layers.
        side: requested settings of the engine.

    Raises:
        GeometryError: the ranks can neither share nor copy the heads evenly.
    """
    tokens, why = base_tokens(reading.cache.layers, side.tp, side.block_tokens)
    _, more = block_sizes(reading.cache.layers, side.tp, side.layout, tokens)
    return tokens, "; ".join(filter(None, (why, more)))


def shape(reading: ModelReading, side: EngineSide, num_blocks: int) -> EngineShape:
    """Return the settings that decide the engine's memory layout.

    Args:
        reading: caches of the model's layers.
        side: requested settings of the engine.
        num_blocks: number of blocks in each rank's pool.

    Raises:
        GeometryError: there are more pipeline ranks than layers, the heads cannot be distributed evenly over
            the tensor-parallel ranks, or the layout does not suit this model.
        ConfigError: a pipeline rank has no layer with a cache.
    """
    layers = reading.cache.layers
    tokens, _ = base_tokens(layers, side.tp, side.block_tokens)
    sizes, _ = block_sizes(layers, side.tp, side.layout, tokens)
    counts = group_counts(layers, side.tp, side.layout, sizes)
    groups = tuple(GroupShape(each, sizes[layers[each[0]]]) for each in group_layers(reading.cache, counts))
    return EngineShape(side.tp, _stages(reading, side.pp), tokens, side.layout, num_blocks, groups=groups)


def _stages(reading: ModelReading, pp: int) -> tuple[int, ...]:
    """Return the number of entries in `reading.cache.layers` on each pipeline rank.

    Layers without a cache count when layers are distributed over the ranks.

    Raises:
        ConfigError: a rank has no layer with a cache.
    """
    cuts = [0, *accumulate(split_stages(len(reading.kept), pp))]
    stages = [sum(reading.kept[first:last]) for first, last in pairwise(cuts)]
    if min(stages) < 1:
        raise ConfigError(
            f"with pp {pp} a pipeline rank has no layer that keeps anything; choose fewer ranks"
        )
    return tuple(stages)
