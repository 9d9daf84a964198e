"""CPU_ATTN's pages as AMX packs them, by vLLM's own operation: what the probe finds, and what it believes.

A process of its own, because vLLM loads one library of operations. The one with AMX's is for processors with
AVX-512's bfloat16. What writes the cache takes no more than AVX-512.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

_TOKENS, _SMALLER, _HEADS, _WIDTH = 64, 32, 2, 64


def _cases() -> list[Any]:
    from support.backends.layers import Case

    common = {"layout": "LBHNC", "heads": _HEADS, "k": _WIDTH, "v": _WIDTH, "tokens": _TOKENS}
    return [
        Case("CPU_ATTN", "auto", **common),
        Case("CPU_ATTN", "fp8_e4m3", scales=(0.037, 0.11), **common),
        Case("CPU_ATTN", "fp8_e5m2", **common),
    ]


def found(case: Any) -> dict[str, Any]:
    """What the probe says of a case's pages, and which wrong adapters it believes."""
    from kvferry.engines.vllm.content import Shard, adapters, page_of_attention, probe
    from kvferry.engines.vllm.content.probe import element_types
    from kvferry.engines.vllm.content.strides import strides_of
    from support.backends.layers import BLOCKS, make
    from support.backends.mutants import mutants

    layer, spec, cache = make(case)
    s, shard = strides_of(cache, spec, BLOCKS), Shard(0, 1, 0, _HEADS)
    (element, *_) = element_types(case.kv_dtype, cache.dtype)
    wrong = [("cpu_kv", adapters.cpu_kv(s, shard)), *mutants(adapters.amx_kv(s, shard))]
    split = replace(spec, block_size=2 * case.tokens)
    return {
        "isa": layer.isa,
        "fields": [f.name for f in page_of_attention(layer, "x", spec, cache, BLOCKS, shard).fields],
        "split": [f.name for f in page_of_attention(layer, "x", split, cache, BLOCKS // 2, shard).fields],
        "tried": len(wrong),
        "believed": [what for what, page in wrong if not probe.find_mismatch(layer, cache, s, page, element)],
    }


def moved(case: Any) -> bool:
    """A block that AMX's operation wrote becomes, byte for byte, what the vector operation writes, and back.

    The blocks of the vector kernels have half as many tokens.
    """
    from kvferry.engines.vllm.content import Shard, page_of_attention
    from support.backends.layers import BLOCKS, make

    pages, images = [], []
    k, v = torch.randn(2, _TOKENS, _HEADS, _WIDTH).to(torch.bfloat16)
    for isa, tokens in (("amx", _TOKENS), ("vec", _SMALLER)):
        layer, spec, cache = make(replace(case, tokens=tokens))
        layer.isa = isa
        pages.append(page_of_attention(layer, "x", spec, cache, BLOCKS, Shard(0, 1, 0, _HEADS)))
        layer.impl.do_kv_cache_update(layer, k, v, cache, torch.arange(_TOKENS))
        images.append(cache[: _TOKENS // tokens].contiguous().view(torch.uint8).reshape(-1).numpy())
    return all(
        np.array_equal(_copied(pages[one], pages[other], images[one]), images[other])
        for one, other in ((0, 1), (1, 0))
    )


def _copied(source: Any, target: Any, image: np.ndarray) -> np.ndarray:
    """The same tokens in pages of another format."""
    from kvferry.planning.cell_copy import plan_page_copy
    from support.cells import runs

    plan, found = plan_page_copy(source, target), np.zeros_like(image)
    for cell in range(_TOKENS // plan.cell_tokens):
        (src, src_cell), (dst, dst_cell) = divmod(cell, plan.src_cells), divmod(cell, plan.dst_cells)
        for one in plan.cell_copies:
            here = src * source.page_bytes + one.src_offsets[src_cell]
            there = dst * target.page_bytes + one.dst_offsets[dst_cell]
            for copy in one.copies:
                for a, b in runs(copy):
                    found[there + b :][: copy.run] = image[here + a :][: copy.run]
    return found


def main() -> None:
    """Print what was found, as JSON."""
    torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: True
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    cases = _cases()
    result = {case.kv_dtype: found(case) for case in cases}
    result["auto"]["moved"] = moved(cases[0])
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
