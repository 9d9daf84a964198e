"""Make vLLM use the same instructions on every machine's CPU."""

from __future__ import annotations


def turn_amx_off() -> None:
    """Make engines of this process compute without AMX.

    With AMX, attention over bfloat16 keeps its pages in an order that cannot be stored in tiers, and figures
    of different machines would be of different things.
    """
    import torch  # noqa: PLC0415 - slow, and reads the environment, which a caller may set first

    torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001 - vLLM asks this function
