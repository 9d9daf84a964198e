"""Description of a page of recurrent state (Mamba and others) as fields.

A page holds the states of one layer, one after the other (`MambaBase.bind_kv_cache`): the last inputs of a
convolution, then the recurrent state. The channels of the convolution come from several projections. The
channels of each projection (`state_format.Segment`) become a field of their own. With these fields, state can
move between different numbers of ranks, and between the two orders in which vLLM keeps the inputs of a
convolution (``SD``: window first, ``DS``: channels first).

With speculative decoding, vLLM adds one column per draft token to the window (the last inputs that the
convolution needs). A step that computes prompt tokens leaves the window in the *first* ``kernel - 1`` columns
(`causal_conv1d_fn`: ``state_len = width - 1``; for a single token, `causal_conv1d_update` with one accepted
token). The other columns are scratch and belong to no field. Only between two steps of speculative decoding
is the window in later columns, and kvferry never moves such a state.

Other states move as opaque bytes, and only between ranks of the same index in engines with the same number of
ranks: if the layer's dimensions do not account for every element, or vLLM's weight loaders do not confirm the
fields (`state_proof`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod
from typing import Any

from kvferry.engines.vllm.state_format import FORMATS, StateFormat
from kvferry.engines.vllm.state_proof import find_mismatch
from kvferry.geometry import Axis, Field, PageFormat, opaque_page

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """Tensor-parallel rank that holds recurrent state.

    Attributes:
        channels_first: order of the axes of convolution states: True for vLLM's ``DS`` order (channels,
            window), False for ``SD`` (window, channels).
    """

    rank: int
    ranks: int
    channels_first: bool


def page_of_state(layer: Any, name: str, spec: Any, device: str, rank: Rank) -> PageFormat:
    """Describe the pages of a recurrent layer: as fields if they are proved, else as opaque bytes.

    Args:
        layer: the engine's recurrent layer, for its dimensions and weight loaders.
        name: name of the layer, for messages.
        spec: the layer's `MambaSpec`.
        device: type of the device that holds the state, such as ``cuda``.
        rank: rank that holds the page.
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
        state: format of the layer's state over all ranks.
        columns: number of inputs per channel for which the convolution's state has space.
        item_bytes: bytes per element of the convolution's state and of the recurrent state; one entry if the
            layer has only one of them.
        rank: rank that holds the page.
    """
    convolution = _convolution(state, columns, item_bytes[0], rank) if state.segments else ()
    if not state.recurrent:
        return convolution
    channels = sum(segment.channels_per_rank(rank.ranks) for segment in state.segments)
    return *convolution, _recurrent(state.recurrent, channels * columns * item_bytes[0], item_bytes[-1], rank)


def _convolution(state: StateFormat, columns: int, item: int, rank: Rank) -> tuple[Field, ...]:
    """Return the fields of a convolution's state: one for the channels of each projection."""
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
