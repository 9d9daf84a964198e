"""Comparison of quantisation scales. Quantised KV that was written with one scale is wrong under another."""

from __future__ import annotations

from kvferry.geometry import Layer


def same_scales(a: Layer, b: Layer) -> bool:
    """Return True if two ranks have equal quantisation scales for all heads of a layer that both hold.

    >>> from kvferry.geometry import Axis, Field, PageFormat, Scale
    >>> def layer(first, *scales):
    ...     k = Field("k", 1, 0, (Axis("head", ((2, 1),), first, 4),))
    ...     return Layer("layers.0", 0, 2, PageFormat("fp8", 0, 2, (k,)), scales)
    >>> same_scales(layer(0, Scale("k", (0.5,))), layer(2))  # scales of all heads: 0.5 and 1
    False
    >>> same_scales(layer(0, Scale("k", (0.5, 0.25))), layer(1, Scale("k", (0.25, 0.125))))  # head 1: 0.25
    True
    """
    return all(_same(source, a, b) for source in {scale.source for scale in (*a.scales, *b.scales)})


def _same(source: str, a: Layer, b: Layer) -> bool:
    ours, theirs = _factors(a, source), _factors(b, source)
    # A single factor holds for all heads of the layer, also for those that the other rank does not have.
    if len(ours) == len(theirs) == 1:
        return ours == theirs
    heads_a, heads_b = _heads(a), _heads(b)
    both = range(max(heads_a.start, heads_b.start), min(heads_a.stop, heads_b.stop))
    return all(_at(ours, head, heads_a) == _at(theirs, head, heads_b) for head in both)


def _factors(layer: Layer, source: str) -> tuple[float, ...]:
    # A layer without a scale has scale 1.
    return next((scale.factors for scale in layer.scales if scale.source == source), (1.0,))


def _heads(layer: Layer) -> range:
    axes = (field.axis("head") for field in layer.page.fields)
    return next((range(axis.start, axis.stop) for axis in axes if axis), range(1))


def _at(factors: tuple[float, ...], head: int, heads: range) -> float:
    return factors[head - heads.start] if len(factors) > 1 else factors[0]
