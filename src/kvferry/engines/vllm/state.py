"""Description of a page of recurrent state (Mamba and others) as fields.

A page holds the states of one layer, one after the other (`MambaBase.bind_kv_cache`): the last inputs of a
convolution, then the recurrent state. The channels of each projection into the convolution (`Segment`) are a
field. So state can move between different numbers of ranks, and between the two orders in which vLLM keeps
the inputs of a convolution (``SD``: window first, ``DS``: channels first).

With speculative decoding, vLLM adds one column per draft token to the window (the last inputs that the
convolution needs). A step that computes prompt tokens leaves the window in the *first* ``kernel - 1`` columns
(`causal_conv1d_fn`: ``state_len = width - 1``; for a single token, `causal_conv1d_update` with one accepted
token). The other columns are scratch and belong to no field. Only between two steps of speculative decoding
is the window in later columns, and kvferry never moves such a state.

If the layer's dimensions do not account for every element, or vLLM's weight loaders do not confirm the fields
(`find_mismatch`), the state moves as opaque bytes, between equal ranks of equally many.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvferry.geometry import Axis, Field, PageFormat, opaque_page

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """Tensor-parallel rank that holds recurrent state, and vLLM's order of its convolution states."""

    rank: int
    ranks: int
    channels_first: bool  # ``DS``, not ``SD``


@dataclass(frozen=True, slots=True)
class Segment:
    """Channels of a convolution that come from the same projection.

    >>> [Segment("conv.b", units=units, width=32).channels_per_rank(4) for units in (1, 8)]  # copied; split
    [32, 64]

    Attributes:
        units: number of heads, groups or channels over all ranks, which are never split. If there is a single
            one, every rank has a copy of it.
    """

    name: str  # of the field
    units: int
    width: int = 1  # number of channels per unit

    @property
    def channels(self) -> int:
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
        recurrent: (name, count) of each axis of the recurrent state, of which the first is sharded; empty
            without one.
    """

    window: int  # number of past inputs per channel that the convolution needs; 0 without one
    segments: tuple[Segment, ...]  # the convolution's channels, in the order of vLLM and checkpoints
    recurrent: tuple[tuple[str, int], ...]

    def shapes(self, ranks: int, columns: int, channels_first: bool) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that vLLM declares for one rank's states: convolution, then recurrent state.

        Args:
            columns: number of inputs per channel for which the convolution's state has space.
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


def page_of_state(layer: Any, name: str, spec: Any, device: str, rank: Rank) -> PageFormat:
    """Describe the pages of a recurrent layer (a `MambaSpec`): as fields if proved, else as opaque bytes.

    `device` is the type of the device that holds the state, such as ``cuda``.
    """
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    # A replicated state is the same on all ranks, so it may move whole between any of them.
    if not spec.tp_replicated:
        fields, why = _fields(layer, kind, spec, rank)
        if not why:
            return PageFormat(f"{kind} {' '.join(dtypes)}", 0, spec.state_content_size_bytes, fields)
        logger.warning(
            "layer %s: content of its %s state is not known (%s): it moves whole, between equal ranks",
            name, kind, why,
        )  # fmt: skip
    shapes = " ".join(f"{tuple(shape)}:{dtype}" for shape, dtype in zip(spec.shapes, dtypes, strict=True))
    order = "channels first" if rank.channels_first else "window first"
    ranks = 1 if spec.tp_replicated else rank.ranks
    return opaque_page(
        f"{kind} {shapes} {order} on {device}", 0, spec.state_content_size_bytes,
        rank.rank if ranks > 1 else 0, ranks,
    )  # fmt: skip


def _fields(layer: Any, kind: str, spec: Any, rank: Rank) -> tuple[tuple[Field, ...], str]:
    """Return the fields of a page, and why they must not be used; empty if the loaders confirm them."""
    if kind not in FORMATS:
        return (), "its mamba type is not known"
    try:
        state = FORMATS[kind](layer)
    except AttributeError as error:
        return (), f"its dimensions are not where they were expected: {error}"
    if indivisible := state.indivisible_fields(rank.ranks):
        return (), f"{', '.join(indivisible)} cannot be shared out evenly over {rank.ranks} ranks"
    columns = _columns(state, spec, rank)
    if columns is None:
        expected = state.shapes(rank.ranks, state.window, rank.channels_first)
        return (), f"its dimensions make shapes {expected}, the engine declares {tuple(spec.shapes)}"
    fields = fields_of(state, columns, [dtype.itemsize for dtype in spec.dtypes], rank)
    return fields, find_mismatch(layer, state, fields)


def _columns(state: StateFormat, spec: Any, rank: Rank) -> int | None:
    """Return the inputs per channel for which the convolution has space; None if the shapes do not fit."""
    declared = tuple(tuple(shape) for shape in spec.shapes)
    # More than the convolution needs is scratch space of speculative decoding.
    for columns in (state.window, state.window + int(spec.num_speculative_blocks)):
        if declared == state.shapes(rank.ranks, columns, rank.channels_first):
            return columns
    return None


def fields_of(state: StateFormat, columns: int, item_bytes: list[int], rank: Rank) -> tuple[Field, ...]:
    """Return the fields of one rank's page of recurrent state.

    Args:
        columns: number of inputs per channel for which the convolution's state has space.
        item_bytes: bytes per element of each state that the layer has.
    """
    convolution = _convolution(state, columns, item_bytes[0], rank) if state.segments else ()
    if not state.recurrent:
        return convolution
    channels = sum(segment.channels_per_rank(rank.ranks) for segment in state.segments)
    return *convolution, _recurrent(state.recurrent, channels * columns * item_bytes[0], item_bytes[-1], rank)


def _convolution(state: StateFormat, columns: int, item: int, rank: Rank) -> tuple[Field, ...]:
    channels = sum(segment.channels_per_rank(rank.ranks) for segment in state.segments)
    # All fields are parts of one array, of shape (channels, columns) or (columns, channels).
    channel, column = (columns * item, item) if rank.channels_first else (item, channels * item)
    fields = []
    offset = 0
    for segment in state.segments:
        held = segment.channels_per_rank(rank.ranks)
        # Every rank has a copy of a segment that cannot be split.
        start = 0 if segment.copied else rank.rank * held
        axes = (
            Axis("channel", ((held, channel),), start, segment.channels),
            Axis("width", ((state.window, column),)),
        )
        fields.append(Field(segment.name, item, offset, axes))
        offset += held * channel
    return tuple(fields)


def _recurrent(axes: tuple[tuple[str, int], ...], offset: int, item: int, rank: Rank) -> Field:
    """Return the field of a dense state with (name, elements over all ranks) axes, the first sharded."""
    (name, total), *inner = axes
    held = total // rank.ranks
    counts = [count for _, count in inner]
    strides = [item * prod(counts[n:]) for n in range(len(axes))]
    first = Axis(name, ((held, strides[0]),), rank.rank * held, total)
    rest = [Axis(n, ((count, stride),)) for (n, count), stride in zip(inner, strides[1:], strict=True)]
    return Field("ssm", item, offset, (first, *rest))


def find_mismatch(layer: Any, state: StateFormat, fields: Sequence[Field]) -> str:
    """Return why `fields` may not be the channels and heads whose state this rank holds; empty if they are.

    The layer's weight loaders fill scratch parameters with the indices that this rank loads.
    """
    try:
        if state.segments and (why := _channel_mismatch(layer, state, fields)):
            return why
        if state.recurrent:
            return _head_mismatch(layer, next(field for field in fields if field.name == "ssm"))
    except Exception as error:  # noqa: BLE001 - a layer whose weight loaders fail is not proved
        return f"its weight loaders could not be asked: {type(error).__name__}: {error}"
    return ""


def _channel_mismatch(layer: Any, state: StateFormat, fields: Sequence[Field]) -> str:
    module = getattr(layer, "conv1d", None)
    weight = (layer.conv if module is None else module).weight
    held = [(field, field.axes[0]) for field in fields if field.name != "ssm"]
    # Not the shape of the weight: vLLM packs weights on some CPUs.
    scratch = _scratch(weight, (sum(axis.count for _, axis in held), 1, state.window + 1))
    expected, whole = [], []
    before = 0
    for _, axis in held:
        whole.append(torch.arange(before, before + axis.total))
        expected.append(torch.arange(before + axis.start, before + axis.stop))
        before += axis.total
    if _loads_in_parts(weight.weight_loader):
        for part, indices in enumerate(whole):
            weight.weight_loader(scratch, _weight_of(indices, scratch), part)
    else:
        weight.weight_loader(scratch, _weight_of(torch.cat(whole), scratch))
    first = 0
    for (field, axis), indices in zip(held, expected, strict=True):
        if not torch.equal(scratch.data[first : first + axis.count, 0, 0], indices.to(scratch.dtype)):
            return f"channels of {field.name} are not [{axis.start}, {axis.stop}) of {axis.total}"
        first += axis.count
    return ""


def _head_mismatch(layer: Any, field: Field) -> str:
    axis = field.axes[0]
    # Lightning attention has no weight with elements for each head, but a decay rate.
    if hasattr(layer, "tp_slope"):
        found, expected = layer.tp_slope, layer.slope_rate[axis.start : axis.stop]
    else:
        weight = layer.D if hasattr(layer, "D") else layer.dt_bias
        rows, rest = divmod(weight.shape[0], axis.count)
        if rest:
            return f"a weight of {weight.shape[0]} elements is not one of {axis.count} heads"
        scratch = _scratch(weight, (rows * axis.count,))
        weight.weight_loader(scratch, torch.arange(rows * axis.total).to(scratch))
        found, expected = scratch.data, torch.arange(rows * axis.start, rows * axis.stop).to(scratch.data)
    if torch.equal(found, expected):
        return ""
    return f"heads are not [{axis.start}, {axis.stop}) of {axis.total}"


def _scratch(weight: Any, shape: tuple[int, ...]) -> Any:
    """Return a float32 parameter with class and attributes of `weight`, for a weight loader to fill."""
    # -1 is no index, so it shows what the loader leaves out. float32 holds every index below 16,777,216.
    data = torch.full(shape, -1.0, dtype=torch.float32)
    scratch = torch.Tensor._make_subclass(type(weight), data, False)  # noqa: FBT003 - positional in torch
    scratch.__dict__.update(weight.__dict__)
    return scratch


def _weight_of(indices: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a convolution's weight, (channels, 1, kernel): each element is the index of its channel."""
    return indices.to(torch.float32).view(-1, 1, 1).expand(-1, *like.shape[1:])


def _loads_in_parts(loader: Any) -> bool:
    # A loader that loads the channels of one projection per call requires the index of the projection.
    part = inspect.signature(loader).parameters.get("loaded_shard_id")
    return part is not None and part.default is inspect.Parameter.empty
