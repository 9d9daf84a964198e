"""The probe over every attention backend, KV cache dtype and layout of vLLM, as a table.

Run in a process of its own, with Triton on PYTHONPATH and ``TRITON_INTERPRET=1``, because the code that makes
GPU backends importable changes vLLM. Prints the table in Markdown, or with ``--sample`` some of its cases:
all that are not interpreted, and few that are.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")

CPU, TRITON, EMULATED = "vLLM's operation on a CPU", "Triton's interpreter", "CUDA's operation, emulated"

NOT_RUN = {
    "CUSTOM": "a placeholder for backends that others register",
    "CUTLASS_MSA": "its layer writes K, V and the indexer's keys in one operation",
    "CUTLASS_MLA": "it takes memory of a GPU when it is imported; it writes as FLASHMLA does",
    "FLASHINFER_MLA_SPARSE_DSV4": "DeepSeek V4's layers write for themselves",
    "FLASHINFER_MLA_SPARSE_DSV41": "DeepSeek V4.1's layers write for themselves",
    "FLASHMLA_MEGA_ATTN_DSV41": "DeepSeek V4.1's layers write for themselves",
    "FLASHMLA_SPARSE_DSV4": "DeepSeek V4's layers write for themselves",
    "FLASHMLA_SPARSE_DSV41": "DeepSeek V4.1's layers write for themselves",
    "HPC_ATTN": "it writes inside its attention, by a package for Hopper GPUs",
    "MINIMAX_M3_SPARSE": "its layer writes K, V and the indexer's keys in one operation",
    "NO_ATTENTION": "vLLM 0.32 names a module that it does not have",
    "ROCM_ATTN": "its operations are HIP's, and interleave tokens",
    "ROCM_FLASHMLA_SPARSE_DSV4": "DeepSeek V4's layers write for themselves",
    "ROCM_SEGMENTED_ATTN": "its head slots are K and V, whose interior no adapter names",
    "TORCH_SDPA": "for vision towers, which keep no KV cache",
    "TRITON_FLASHINFER": "two backends in one, whose constructors need a GPU",
    "TRITON_MSA": "its layer writes K, V and the indexer's keys in one operation",
    "TURBOQUANT": "its constructor needs a GPU; cells are expected",
    "ULTRAQUANT": "its constructor needs a GPU; cells are expected",
}
"""Backends that the probe does not run here, and why. A machine that has them runs it at start."""

SAMPLED_DTYPES = ("auto", "fp8", "fp8_e5m2", "int8_per_token_head")
"""KV cache dtypes of a sample's interpreted cases: one of each kind but int4, which takes longest."""

NOT_EMULATED = {
    ("FLASHMLA_SPARSE", "nvfp4_ds_mla"): "its operation is not emulated; cells are expected",
    ("AMX_MLA", "float16"): "vLLM refuses it",
    ("AMX_MLA", "bfloat16"): "vLLM refuses it",
}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (backend, dtypes, layouts, how pages move, how that was shown)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for member in AttentionBackendEnum:
        if member.name in NOT_RUN:
            yield member.name, " ".join(_dtypes(member)), "", "not run", NOT_RUN[member.name]
            continue
        backend = member.get_class()
        found = defaultdict[tuple[str, str], dict[str, list[str]]](lambda: defaultdict(list))
        for kv_dtype in backend.supported_kv_cache_dtypes:
            for layout in _layouts(backend):
                found[_verdict(member.name, kv_dtype, layout)][kv_dtype].append(layout)
        for (verdict, how), by_dtype in found.items():
            same = defaultdict[tuple[str, ...], list[str]](list)
            for kv_dtype, layouts in by_dtype.items():
                same[tuple(layouts)].append(kv_dtype)
            for layouts, dtypes in same.items():
                every = "any" if len(layouts) == len(LAYOUTS) else " ".join(layouts)
                yield member.name, " ".join(dtypes), every, verdict, how


def sample() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (backend, dtype, layout, how its pages move, how that was shown)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name in (member.name for member in AttentionBackendEnum if member.name not in NOT_RUN):
        backend = AttentionBackendEnum[name].get_class()
        layouts = _layouts(backend)
        for number, kv_dtype in enumerate(backend.supported_kv_cache_dtypes):
            if not _is_triton(name):
                taken = layouts
            elif kv_dtype in SAMPLED_DTYPES:
                taken = [layouts[number % len(layouts)]]
            else:
                continue
            for layout in taken:
                yield name, kv_dtype, layout, *_verdict(name, kv_dtype, layout)


def _dtypes(member: Any) -> list[str]:
    """KV cache dtypes of a backend that is not run, if it can be imported at all."""
    try:
        return list(member.get_class().supported_kv_cache_dtypes)
    except Exception:  # noqa: BLE001 - it is not run
        return []


def _layouts(backend: Any) -> list[str]:
    declared = backend.supported_kv_cache_layouts()
    return list(LAYOUTS) if declared is None else [layout.name for layout in declared]


def _verdict(name: str, kv_dtype: str, layout: str) -> tuple[str, str]:
    from kvferry.engines.vllm.content import Shard, page_of_attention
    from support.backends.layers import BLOCKS, make

    if (name, kv_dtype) in NOT_EMULATED:
        return "not run", NOT_EMULATED[name, kv_dtype]
    case = case_of(name, kv_dtype, layout)
    layer, spec, cache = make(case)
    page = page_of_attention(layer, name, spec, cache, BLOCKS, Shard(0, 2, 0, 2 * case.heads))
    how = CPU if name in ("CPU_ATTN", "CPU_MLA", "AMX_MLA") else TRITON if _is_triton(name) else EMULATED
    names = [field.name for field in page.fields]
    if page.opaque:
        return "whole pages", how
    if len(page.fields) == 1 and " of " in names[0]:
        return "cells", how
    return " ".join(f"`{name}`" for name in names), how


def _is_triton(name: str) -> bool:
    return name in ("TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_FLASH_ATTN", "FLASH_ATTN_DIFFKV")


def case_of(name: str, kv_dtype: str, layout: str) -> Any:
    """A small cache of a backend: the interpreter takes its time for every token and head."""
    from support.backends.layers import Case

    if "MLA" in name:
        return Case(name, kv_dtype, layout, heads=1, k=576, v=0, tokens=16)
    if _is_triton(name):
        return Case(name, kv_dtype, layout, k=32, v=16 if "DIFFKV" in name else 32, tokens=8)
    return Case(name, kv_dtype, layout)


def table() -> str:
    """Return the table in Markdown."""
    head = ("Backend", "KV cache dtype", "Layout", "Pages move as", "Shown by")
    lines = [head, tuple("---" for _ in head), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print the table, or a sample as JSON."""
    import torch

    from support.backends.pretend import pretend

    # Not `no_amx`: vLLM's library for AVX512-BF16 has the operations of AMX_MLA.
    torch.cpu._is_amx_tile_supported = lambda: False
    pretend(triton=True)
    from support.backends import emulated

    logging.disable(logging.WARNING)
    emulated.install(_Forever())
    sys.stdout.write(json.dumps(list(sample())) if "--sample" in sys.argv else table())


class _Forever:
    """Sets attributes as pytest's monkeypatch does, for as long as the process lasts."""

    @staticmethod
    def setattr(of: Any, name: str, value: Any, **_: Any) -> None:
        setattr(of, name, value)

    @staticmethod
    def setitem(of: Any, name: str, value: Any) -> None:
        of[name] = value


if __name__ == "__main__":
    main()
