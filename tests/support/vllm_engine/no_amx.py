"""Lets vLLM's CPU backends take the same instructions on every machine: importing this turns AMX off.

With AMX, attention over bfloat16 packs its pages in another order (`support.backends.amx`), and other models
can be built. Tests of a family in bfloat16 would then test other things from machine to machine. Without AMX,
vLLM 0.32 takes another kernel with AVX512-BF16, which ended engines of Qwen3.5 ("expect x to be transposed").
"""

from __future__ import annotations

import torch


def declare() -> None:
    """In this process."""
    torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False


declare()
