"""The computation of a prefix, in floating-point operations of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.geometry import GroupKind, GroupPattern

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """The computation of a token: a multiplication and an addition for each weight and for attention.

    Attributes:
        weights: parameters that a token passes, without embeddings.
        full: attention of all layers that attend to everything, per token that is attended to.
        window: the same for layers with a sliding window.
    """

    weights: float
    full: float
    window: float = 0.0

    def of_prefix(self, tokens: npt.ArrayLike, groups: tuple[GroupPattern, ...]) -> Floats:
        """Return the operations that compute the first tokens of a prompt.

        >>> from kvferry.geometry import Attention
        >>> cost, groups = ComputeCost(10, 1, 1), (Attention(GroupKind.FULL), Attention(GroupKind.SLIDING, 2))
        >>> cost.of_prefix([1, 2, 3], groups).tolist()
        [22.0, 46.0, 71.0]
        """
        number = np.asarray(tokens, np.float64)
        found: Floats = 2 * self.weights * number + self.full * number * (number + 1) / 2
        for group in groups:
            if group.kind is GroupKind.SLIDING:
                whole = np.minimum(number, group.attention_span)
                found += self.window * (whole * (whole + 1) / 2 + (number - whole) * group.attention_span)
        return found


# Layers, heads and their dimensions are those of each model's config.json. A layer takes 4 operations for
# each element of a head and token that it attends to; MLA 2 for each element of keys (192) and values (128).
COSTS: Mapping[str, ComputeCost] = {
    "Llama-3.1-8B": ComputeCost(6.98e9, full=32 * 32 * 4 * 128),
    "gemma-3-27b-it": ComputeCost(25.6e9, full=10 * 32 * 4 * 128, window=52 * 32 * 4 * 128),
    "Qwen3-Next-80B-A3B": ComputeCost(3.0e9, full=12 * 16 * 4 * 256),
    "DeepSeek-V3": ComputeCost(37e9, full=61 * 128 * 2 * (192 + 128)),
}
