"""Proof, with vLLM's weight loaders, that the fields of a rank's state are right.

Channel ``c`` of a convolution's weight is applied to channel ``c`` of its state, and a head's weights are
applied to the head's state. So a rank has the state of exactly those channels and heads whose weights it
loads. The proof gives each weight loader a weight in which every element is the index of its channel or row.
The loader keeps this rank's part. The proof checks that this part has the indices that the fields claim. It
changes nothing in the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from kvferry.engines.vllm.state_format import StateFormat
from kvferry.geometry import Field


def find_mismatch(layer: Any, state: StateFormat, fields: Sequence[Field]) -> str:
    """Check that `fields` describes exactly the channels and heads whose state this rank holds.

    The layer is not changed.

    Returns:
        Reason why the fields are wrong, or why the check could not be made; empty if the fields are right.
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
    """Check the convolution's channels, with its weight loader."""
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
    """Check the heads of the recurrent state, with the loader of a weight that has elements for each head."""
    axis = field.axes[0]
    # Lightning attention has no such weight, but a decay rate per head.
    if hasattr(layer, "tp_slope"):
        if torch.equal(layer.tp_slope, layer.slope_rate[axis.start : axis.stop]):
            return ""
        return f"heads are not [{axis.start}, {axis.stop}) of {axis.total}"
    weight = layer.D if hasattr(layer, "D") else layer.dt_bias
    rows, rest = divmod(weight.shape[0], axis.count)
    if rest:
        return f"a weight of {weight.shape[0]} elements is not one of {axis.count} heads"
    scratch = _scratch(weight, (rows * axis.count,))
    weight.weight_loader(scratch, torch.arange(rows * axis.total).to(scratch))
    if torch.equal(scratch.data, torch.arange(rows * axis.start, rows * axis.stop).to(scratch.data)):
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
    """Return True if a weight loader loads the channels of one projection per call."""
    # Such a loader requires the index of the projection.
    part = inspect.signature(loader).parameters.get("loaded_shard_id")
    return part is not None and part.default is inspect.Parameter.empty
