"""The settings of one engine that decide its memory layout, from the flags of ``kvferry plan``.

Missing flags take the values that vLLM 0.32 chooses on a CUDA machine. The default layout is the one that
kvferry's connector requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvferry.common.errors import ConfigError
from kvferry.geometry import LAYOUTS, GroupKind
from kvferry.tools.models import ModelReading
from kvferry.tools.models.layout import EngineShape, GroupShape, group_layers, split_stages
from kvferry.tools.plan.blocks import base_tokens, block_sizes, group_counts

# Stands for the engine's default layout.
AUTO = "auto"
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The requested settings of one engine that decide its memory layout."""

    tp: int = 1
    pp: int = 1
    layout: str = "LBNHC"  # one of `LAYOUTS`, NHD or HND
    # `block_tokens`, `backend`: None for vLLM's choice.
    block_tokens: int | None = None
    backend: str | None = None
    dcp: int = 1  # number of neighbouring tensor-parallel ranks that divide the tokens of a block
    turn_tokens: int = 1  # tokens that each of them takes in turn

    def __post_init__(self) -> None:
        known = _ALIASES.get(self.layout.upper(), self.layout.upper())
        if known not in LAYOUTS:
            listed = ", ".join((AUTO, *LAYOUTS, *_ALIASES))
            raise ConfigError(f"layout {self.layout!r} is not known; choose one of {listed}")
        object.__setattr__(self, "layout", known)
        for name, value in (
            ("tp", self.tp),
            ("pp", self.pp),
            ("block size", self.block_tokens),
            ("dcp", self.dcp),
            ("interleave", self.turn_tokens),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, it must be at least 1")
        if self.tp % self.dcp:
            raise ConfigError(f"dcp is {self.dcp}; it must divide tp, which is {self.tp}")

    @property
    def label(self) -> str:
        """Short description of the engine, such as ``TP2, layout LBNHC``, without the block size."""
        pipeline = f", PP{self.pp}" if self.pp > 1 else ""
        context = f", DCP{self.dcp} in turns of {self.turn_tokens}" if self.dcp > 1 else ""
        backend = f", {self.backend}" if self.backend else ""
        return f"TP{self.tp}{pipeline}{context}, layout {self.layout}{backend}"


def resolve_layout(name: str, reading: ModelReading) -> str:
    """Return the name of an engine's memory layout, after replacing `AUTO` by the default for the model.

    The default is the layout that an engine with kvferry's connector uses. Another name is not checked.
    """
    if name.lower() != AUTO:
        return name
    kinds = set(reading.cache.layers)
    # DeepSeek V4 requires blocks as the outermost axis.
    if any(cache.state_tokens > 1 for cache in kinds):
        return "BLHNC"
    # vLLM's MLA backends do not declare support for blocks as the outermost axis.
    if any(cache.kind is GroupKind.MLA for cache in kinds):
        return "LBNHC"
    # BHLNC has the head axis outside of layers, so all pages must have one shape.
    return "BLHNC" if len(kinds) > 1 else "BHLNC"


def block_tokens(reading: ModelReading, side: EngineSide) -> tuple[int, str]:
    """Return the engine's number of tokens per block, and the reason for this and for layers with more.

    The number is that of all ranks that divide a block's tokens. The reason is empty if all layers have the
    requested block size, or vLLM's usual size (16).
    """
    tokens, why = base_tokens(reading.cache.layers, side.tp, side.block_tokens)
    _, more = block_sizes(reading.cache.layers, side.tp, side.layout, tokens)
    return tokens * side.dcp, "; ".join(filter(None, (why, more)))


def shape(reading: ModelReading, side: EngineSide, num_blocks: int) -> EngineShape:
    """Return all settings that decide an engine's memory layout, with vLLM's choice where `side` has none.

    Raises:
        GeometryError: there are more pipeline ranks than layers, the heads cannot be distributed evenly over
            the tensor-parallel ranks, or `block_sizes` rejects the layout.
        ConfigError: a pipeline rank has no layer with a cache, or vLLM refuses the context parallelism.
    """
    layers = reading.cache.layers
    tokens, _ = base_tokens(layers, side.tp, side.block_tokens)
    _check_context_parallelism(reading, side, tokens)
    sizes, _ = block_sizes(layers, side.tp, side.layout, tokens)
    counts = group_counts(layers, side.tp, side.layout, sizes)
    groups = tuple(
        GroupShape(each, sizes[layers[each[0]]] * side.dcp) for each in group_layers(reading.cache, counts)
    )
    return EngineShape(
        side.tp,
        _stages(reading, side.pp),
        tokens,
        side.layout,
        num_blocks,
        groups=groups,
        dcp=side.dcp,
        turn_tokens=side.turn_tokens,
    )


def _check_context_parallelism(reading: ModelReading, side: EngineSide, tokens: int) -> None:
    """Raise ConfigError if vLLM would not let ranks divide the tokens of a block.

    The rules are those of vLLM's ``ModelConfig.verify_with_parallel_config``, of its managers of the KV
    cache, which assert that windows, attention chunks and state are not divided, and of
    ``VllmConfig.validate_block_size``.
    """
    if side.dcp == 1:
        return
    if undivided := {
        cache.kind.value
        for cache in reading.cache.layers
        if cache.kind not in (GroupKind.FULL, GroupKind.MLA) or cache.state_tokens > 1
    }:
        raise ConfigError(
            f"dcp is {side.dcp}, but vLLM divides no tokens of a model with {', '.join(sorted(undivided))} "
            "layers; choose 1"
        )
    if tokens % side.turn_tokens:
        raise ConfigError(
            f"interleave is {side.turn_tokens}; it must divide the {tokens} tokens of a rank's block"
        )
    # Ranks with copies of a head divide its tokens.
    heads = max(field.heads for cache in reading.cache.layers for field in cache.fields)
    if heads and side.dcp * heads > side.tp:
        raise ConfigError(
            f"dcp is {side.dcp} at tp {side.tp}; with {heads} KV heads, vLLM takes at most "
            f"{max(side.tp // heads, 1)}"
        )
    if heads and reading.cache.query_heads // heads % side.dcp:
        raise ConfigError(
            f"dcp is {side.dcp}; it must divide the {reading.cache.query_heads // heads} attention heads "
            "for each KV head"
        )


def _stages(reading: ModelReading, pp: int) -> tuple[int, ...]:
    cuts = [0, *accumulate(split_stages(len(reading.kept), pp))]
    # Ranks share the model's layers, of which one may have no cache, or several.
    stages = [sum(reading.kept[first:last]) for first, last in pairwise(cuts)]
    if min(stages) < 1:
        raise ConfigError(f"with pp {pp} a pipeline rank has no layer with a KV cache; choose fewer ranks")
    return tuple(stages)
