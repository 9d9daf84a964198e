"""The native kernel that copies cells in host memory (`strided_copy.c`), if this installation has one.

The build compiles it where there is a C compiler (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from kvferry.planning.descriptors import Int64s

CopyKernel: TypeAlias = Callable[[Int64s, Int64s, int, Int64s, bool], None]
"""Function that copies cells, with these arguments:

- address of every cell at the source, int64 of shape (cells,)
- address of every cell at the destination, int64 of shape (cells,)
- length of a run in bytes
- loops, outermost first, int64 of shape (loops, 3): count, source stride, and destination stride in bytes
- whether long runs are written past the CPU's caches

Nothing is checked: every run must be inside memory, and the two sides must not overlap.
"""

# Largest number of loops that the kernel takes.
MAX_LOOPS = 16


def load_kernel(library: Path) -> CopyKernel:
    """Load the kernel. Raise OSError if the library is missing, or for another kind of machine."""
    function = ctypes.CDLL(str(library)).kvferry_copy_cells
    function.restype = None
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_int,
    ]  # fmt: skip

    def copy(sources: Int64s, destinations: Int64s, run: int, loops: Int64s, streamed: bool) -> None:
        # ctypes releases the interpreter lock during the call.
        function(
            sources.ctypes.data, destinations.ctypes.data, len(sources), run,
            loops.ctypes.data, len(loops), streamed,
        )  # fmt: skip

    return copy


def _kernel_or_reason() -> tuple[CopyKernel | None, str]:
    library = Path(__file__).with_name("_strided_copy.so")
    if not library.exists():
        return None, "it was not built, because the installation found no working C compiler"
    try:
        return load_kernel(library), ""
    except (OSError, AttributeError) as error:  # AttributeError: a library without the function
        return None, f"it cannot be loaded: {error}"


KERNEL, WHY_NO_KERNEL = _kernel_or_reason()
