"""Formats of recurrent state, by mamba type. They are derived from the dimensions of vLLM's own layers.

A causal convolution remembers the last ``kernel - 1`` inputs of every channel (the window). Its channels are
those of several projections, one after the other. Each projection is sharded over the ranks on its own. With
two ranks, for example, rank 0 of Mamba2 has the first half of x, of B and of C. That is not the first half of
all channels. The recurrent state, if there is one, follows the convolution in memory. It is sharded by its
first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Segment:
    """Channels of a convolution that come from the same projection.

    >>> [Segment("conv.b", units=units, width=32).channels_per_rank(4) for units in (1, 8)]  # copied; split
    [32, 64]

    Attributes:
        name: name of the field that describes these channels.
        units: number of units over all ranks. A unit is a head, a group or a channel, and is never split
            between ranks. If there is a single unit, every rank has a copy of it.
        width: number of channels per unit.
    """

    name: str
    units: int
    width: int = 1

    @property
    def channels(self) -> int:
        """Number of channels over all ranks. Copies on several ranks count once."""
        return self.units * self.width

    @property
    def copied(self) -> bool:
        return self.units == 1

    def channels_per_rank(self, ranks: int) -> int:
        return self.channels if self.copied else self.units // ranks * self.width


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Format of the state that a recurrent layer keeps for a sequence, over all ranks.

    Attributes:
        window: number of past inputs per channel that the convolution needs, which is its kernel size less
            one; 0 without a convolution.
        segments: groups of the convolution's channels, one per projection, in the order in which vLLM and
            checkpoints store them. Empty without a convolution.
        recurrent: (name, count) of each axis of the recurrent state. The first axis is sharded, and the last
            axis varies fastest. Empty without a recurrent state.
    """

    window: int
    segments: tuple[Segment, ...]
    recurrent: tuple[tuple[str, int], ...]

    def shapes(self, ranks: int, columns: int, channels_first: bool) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that vLLM declares for one rank's states: convolution, then recurrent state.

        Args:
            ranks: number of tensor-parallel ranks.
            columns: number of inputs per channel for which the convolution's state has space.
            channels_first: order of the convolution's axes, as in `state.Rank`.
        """
        shapes: list[tuple[int, ...]] = []
        if self.segments:
            channels = sum(segment.channels_per_rank(ranks) for segment in self.segments)
            shapes.append((channels, columns) if channels_first else (columns, channels))
        if self.recurrent:
            first, *rest = (count for _, count in self.recurrent)
            shapes.append((first // ranks, *rest))
        return tuple(shapes)

    def indivisible_fields(self, ranks: int) -> list[str]:
        """Return the names of the fields that cannot be divided evenly among the ranks."""
        shared = [(s.name, s.units) for s in self.segments if not s.copied]
        shared += [("ssm", count) for _, count in self.recurrent[:1]]
        return [name for name, count in shared if count % ranks]


def mamba1(layer: Any) -> StateFormat:
    """Return the state format of a Mamba 1 layer (`MambaMixer`)."""
    # Each inner channel has one channel of the convolution and one row of recurrent state.
    channels = layer.intermediate_size
    recurrent = (("channel", channels), ("state", layer.ssm_state_size))
    return StateFormat(layer.conv_kernel_size - 1, (Segment("conv.x", channels),), recurrent)


def mamba2(layer: Any) -> StateFormat:
    """Return the state format of a Mamba 2 layer (`MambaMixer2`)."""
    segments = (
        # The channels of x are sharded by heads, and those of B and C by groups. Every rank has a copy of a
        # single group, and `layer.n_groups` counts all copies (`extra_groups_for_head_shards`), but
        # `layer.norm.n_groups` counts the group once.
        Segment("conv.x", layer.num_heads, layer.head_dim),
        Segment("conv.b", layer.norm.n_groups, layer.ssm_state_size),
        Segment("conv.c", layer.norm.n_groups, layer.ssm_state_size),
    )
    recurrent = (("head", layer.num_heads), ("channel", layer.head_dim), ("state", layer.ssm_state_size))
    return StateFormat(layer.conv_kernel_size - 1, segments, recurrent)


def gated_delta(layer: Any) -> StateFormat:
    """Return the state format of a gated delta net layer or a Kimi delta attention layer."""
    # In Kimi delta attention, q, k and v have the same number of heads.
    if not hasattr(layer, "num_k_heads"):
        heads, width = layer.num_heads, layer.head_dim
        segments = tuple(Segment(name, heads, width) for name in ("conv.q", "conv.k", "conv.v"))
        return StateFormat(layer.conv_size - 1, segments, (("head", heads), ("value", width), ("key", width)))
    segments = (
        # The channels of q and k are sharded by key heads, and those of v by value heads.
        Segment("conv.q", layer.num_k_heads, layer.head_k_dim),
        Segment("conv.k", layer.num_k_heads, layer.head_k_dim),
        Segment("conv.v", layer.num_v_heads, layer.head_v_dim),
    )
    recurrent = (("head", layer.num_v_heads), ("value", layer.head_v_dim), ("key", layer.head_k_dim))
    return StateFormat(layer.conv_kernel_size - 1, segments, recurrent)


def linear(layer: Any) -> StateFormat:
    """Return the state format of lightning attention: one matrix per head, and no convolution."""
    recurrent = (("head", layer.num_heads), ("key", layer.head_dim), ("value", layer.head_dim))
    return StateFormat(0, (), recurrent)


def short_conv(layer: Any) -> StateFormat:
    """Return the state format of LFM2's gated short convolution, which has no recurrent state."""
    return StateFormat(layer.L_cache - 1, (Segment("conv", layer.conv_dim),), ())


FORMATS: dict[str, Callable[[Any], StateFormat]] = {
    "MAMBA1": mamba1,
    "MAMBA2": mamba2,
    "GDN_ATTN": gated_delta,
    "LINEAR": linear,
    "SHORT_CONV": short_conv,
}
"""Function that derives the state format from a layer, by name in vLLM's `MambaAttentionBackendEnum`."""
