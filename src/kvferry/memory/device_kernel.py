"""The Triton kernel that copies cells on a GPU, if Triton is installed. vLLM for CUDA installs it.

The kernel sees only addresses, so it copies between any two of the block pool, staging memory on the same
GPU, and host memory that is registered with CUDA. A *tile* is the part of a cell that one program copies at a
time: some runs, and some words of each.
"""

# The kernel's arguments have no annotations that Python could check: Triton compiles them.
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError as error:
    WHY_NO_KERNEL = f"Triton cannot be imported ({error}); install triton"
    copy_cells_kernel: Any = None
else:
    WHY_NO_KERNEL = ""

    @triton.jit(
        do_not_specialize=["tasks", "tiles", "column_tiles"],
        do_not_specialize_on_alignment=["source_cells", "destination_cells", "loops"],
    )  # type: ignore[untyped-decorator]
    def copy_cells_kernel(  # type: ignore[no-untyped-def]
        source, destination, source_cells, destination_cells, loops, run_words, tasks, tiles, column_tiles,
        LOOPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        WORD: tl.constexpr, UNIT: tl.constexpr,
    ):  # fmt: skip
        """Copy cells, which consist of runs at the places that nested loops describe.

        Args:
            source, destination: pointers to words of `WORD` bytes.
            source_cells, destination_cells: byte offset of each cell from these pointers, int64 of shape
                (n,).
            loops: int64 of shape (LOOPS, 3), the innermost loop first: count, and stride in bytes at the
                source and at the destination.
            tasks: number of tiles of all cells. With 0, the kernel copies nothing.
            tiles, column_tiles: number of tiles of a cell, and of a run.
            ROWS, COLUMNS: runs of a tile, and words of each run in it.
            WORD, UNIT: bytes of a word, and the divisor of all offsets and strides.
        """
        # Triton copies `UNIT` bytes at a time only if it can prove that offsets and strides are multiples,
        # hence the divisions and multiplications by a constant.
        words_per_unit: tl.constexpr = UNIT // WORD
        runs: tl.constexpr = ROWS
        for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
            cell = task // tiles
            tile = task % tiles
            run = (tile // column_tiles) * runs + tl.arange(0, ROWS)
            column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
            there = tl.zeros([ROWS], tl.int64) + tl.load(source_cells + cell) // UNIT
            here = tl.zeros([ROWS], tl.int64) + tl.load(destination_cells + cell) // UNIT
            left = run
            for loop in tl.static_range(LOOPS):
                count = tl.load(loops + 3 * loop).to(tl.int32)
                step = left % count
                left = left // count
                there += step * (tl.load(loops + 3 * loop + 1) // UNIT)
                here += step * (tl.load(loops + 3 * loop + 2) // UNIT)
            # After the last loop nothing is left of the index of a run that exists.
            wanted = (left == 0)[:, None] & (column < run_words)[None, :]
            from_ = source + (there * words_per_unit)[:, None] + column[None, :]
            to = destination + (here * words_per_unit)[:, None] + column[None, :]
            tl.store(to, tl.load(from_, mask=wanted), mask=wanted)
