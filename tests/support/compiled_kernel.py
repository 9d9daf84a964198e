"""Compile the kernel that copies cells for GPUs that are not here, and print its memory accesses, as JSON.

Run in a process of its own, with Triton on PYTHONPATH. Triton's wheel has NVIDIA's assembler.
"""

from __future__ import annotations

import json
import re

POINTERS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
SHAPES = {
    "16 bytes": {"WORD": 8, "UNIT": 16, "LOOPS": 2, "ROWS": 128, "COLUMNS": 16},
    "one run": {"WORD": 8, "UNIT": 16, "LOOPS": 0, "ROWS": 1, "COLUMNS": 2048},
    "odd offsets": {"WORD": 8, "UNIT": 8, "LOOPS": 2, "ROWS": 64, "COLUMNS": 32},
    "one element": {"WORD": 2, "UNIT": 2, "LOOPS": 3, "ROWS": 2048, "COLUMNS": 1},
    "bytes": {"WORD": 1, "UNIT": 1, "LOOPS": 1, "ROWS": 2, "COLUMNS": 1024},
}
ARCHITECTURES = 80, 90, 100


def accesses(shape: dict[str, int], architecture: int) -> list[str]:
    """Compile for an architecture with what Triton learns from arguments: aligned pointers, whole runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvferry.memory.device_copy import _WARPS
    from kvferry.memory.device_kernel import copy_cells_kernel

    names = copy_cells_kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | dict.fromkeys(shape, "constexpr")
    kinds |= dict.fromkeys(("source", "destination"), POINTERS[shape["WORD"]])
    kinds |= dict.fromkeys(("source_cells", "destination_cells", "loops"), "*i64")
    aligned = ["source", "destination", "run_words"] if shape["UNIT"] == 16 else []
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=copy_cells_kernel, signature=kinds, constexprs=shape, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=target, options={"num_warps": _WARPS})
    assert built.asm["cubin"]
    return sorted(set(re.findall(r"(?:ld|st)\.global[.\w]*", built.asm["ptx"])))


if __name__ == "__main__":
    found = {f"{name}, {cc}": accesses(shape, cc) for name, shape in SHAPES.items() for cc in ARCHITECTURES}
    print(json.dumps(found))  # noqa: T201 - a test reads it
