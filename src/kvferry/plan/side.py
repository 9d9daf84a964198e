"""The flags of one engine, to its shape.

What is not given is what vLLM 0.32 would choose on a CUDA machine: blocks of 16 tokens, for models with
recurrent state a block so large that an attention page holds a snapshot, and the layout that kvferry's
connector asks it for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvferry.errors import ConfigError
from kvferry.geometry import GroupKind
from kvferry.geometry.interior import interior_of
from kvferry.geometry.layout import LAYOUTS, EngineShape, even_stages
from kvferry.geometry.models import ModelReading
from kvferry.geometry.store import LayerStore

BLOCK_TOKENS = 16
AUTO = "auto"
"""The name for the layout that an engine has by itself."""
_HYBRID_LATENT_ALIGNMENT = 128
_SIMILAR = 1.5
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True, slots=True)
class Side:
    """One engine, as it is asked for.

    Attributes:
        tp, pp: ranks.
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
        """For people, without the block size."""
        parallel = [f"TP{self.tp}", *([f"PP{self.pp}"] if self.pp > 1 else [])]
        return f"{' '.join(parallel)} {self.layout}"


def layout_of(name: str, reading: ModelReading) -> str:
    """The layout of that name; for `AUTO`, what an engine with kvferry's connector has by itself.

    That is blocks outermost, where vLLM can: MLA backends do not declare it, and keep vLLM's LBNHC; where
    layers differ, heads cannot be outside of layers.
    """
    if name.lower() != AUTO:
        return name
    kinds = set(reading.cache.layers)
    if any(store.kind is GroupKind.MLA for store in kinds):
        return "LBNHC"
    return "BLHNC" if len(kinds) > 1 else "BHLNC"


def block_tokens(reading: ModelReading, side: Side) -> tuple[int, str]:
    """Tokens of a block, and why, in words; empty if it is what was asked for or vLLM's ordinary one.

    vLLM's rule (`Platform._align_hybrid_block_size`): the least multiple of 16, of 128 for latents, whose
    attention page is at least a page of state. Both shrink with tensor parallelism, not alike, so that the
    block size depends on it.

    Raises:
        GeometryError: heads do not go onto so many ranks.
    """
    stores = dict.fromkeys(reading.cache.layers)
    if all(store.block_tokens for store in stores):
        return max(store.block_tokens for store in stores), ""
    if side.block_tokens is not None:
        return side.block_tokens, ""
    state = [_page_bytes(s, side.tp) for s in stores if s.kind is GroupKind.STATE]
    tokens = [_page_bytes(s, side.tp) for s in stores if s.kind is not GroupKind.STATE]
    if not state or not tokens:
        return BLOCK_TOKENS, ""
    latent = any(store.kind is GroupKind.MLA for store in stores)
    step = _HYBRID_LATENT_ALIGNMENT if latent else BLOCK_TOKENS
    found = step * -(-max(state) // (step * max(tokens)))
    return found, (
        f"blocks of {found:,} tokens at TP{side.tp}: vLLM makes a page of attention "
        f"({max(tokens):,} bytes per token) hold a snapshot of state ({max(state):,} bytes)"
    )


def group_size(stores: Sequence[LayerStore]) -> int:
    """Layers of a group, as vLLM forms them; 0: one group per kind.

    Its rule (`_get_kv_cache_groups_uniform_page_size`): where kinds differ, all groups have as many layers as
    the rarest kind, or as the commonest one if that is not half as many again.

    Args:
        stores: what every layer keeps.
    """
    alike = Counter(stores)
    if len({store.kind for store in alike}) == 1:
        return 0
    least, most = min(alike.values()), max(alike.values())
    return most if most < _SIMILAR * least else least


def shape(reading: ModelReading, side: Side, num_blocks: int) -> EngineShape:
    """The engine's shape, with `num_blocks` blocks in each rank's pool.

    Raises:
        GeometryError: more pipeline ranks than layers.
    """
    tokens, _ = block_tokens(reading, side)
    return EngineShape(
        side.tp, _stages(reading, side.pp), tokens, side.layout, num_blocks,
        group_size=group_size(reading.cache.layers),
    )  # fmt: skip


def _stages(reading: ModelReading, pp: int) -> tuple[int, ...]:
    """Layers that keep something, per pipeline rank: ranks share the model's layers out, all of them."""
    cuts = [0, *accumulate(even_stages(len(reading.kept), pp))]
    stages = [sum(reading.kept[first:last]) for first, last in pairwise(cuts)]
    if min(stages) < 1:
        raise ConfigError(
            f"with pp {pp} a pipeline rank has no layer that keeps anything; choose fewer ranks"
        )
    return tuple(stages)


def _page_bytes(store: LayerStore, tp: int) -> int:
    """Bytes of a snapshot, or of one token, on one rank."""
    return interior_of(store, 1, 1, 0, tp).page_bytes
