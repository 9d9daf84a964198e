"""The native kernel that copies and digests cells in host memory (`strided_copy.c`), if there is one.

The build compiles it where there is a C compiler (`hatch_build.py`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.planning.descriptors import Int64s

# Largest number of loops that the kernel takes.
MAX_LOOPS = 16


class Kernel:
    """The functions of the library. They release the interpreter's lock.

    Nothing is checked: every run must be inside memory, and the two sides of a copy must not overlap. `loops`
    are outermost first, int64 of shape (loops, 3): count, source stride, and destination stride in bytes.
    """

    def __init__(self, library: Path) -> None:
        """Load the library. Raise OSError if it is missing, or for another kind of machine."""
        loaded = ctypes.CDLL(str(library))
        cells: list[Any] = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._copy: Any = loaded.kvferry_copy_cells
        self._copy.restype = None
        self._copy.argtypes = [*cells, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._digest: Any = loaded.kvferry_digest_cells
        self._digest.restype = ctypes.c_uint64
        self._digest.argtypes = [*cells, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    def copy(self, sources: Int64s, destinations: Int64s, run: int, loops: Int64s, streamed: bool) -> None:
        """Copy cells.

        Args:
            sources, destinations: address of every cell on each side, int64 of shape (cells,).
            run: bytes.
            streamed: whether long runs are written past the CPU's caches.
        """
        self._copy(
            sources.ctypes.data, destinations.ctypes.data, len(sources), run,
            loops.ctypes.data, len(loops), streamed,
        )  # fmt: skip

    def digest(
        self, sources: Int64s, positions: Int64s, run: int, loops: Int64s, keys: npt.NDArray[np.uint32]
    ) -> int:
        """Return the share of cells in a digest (`memory.image_digest`).

        Args:
            sources: address of every cell, int64 of shape (cells,).
            positions: bytes from the start of the image to every cell, int64 of shape (cells,).
            run, loops: as of a copy into the image.
            keys: those of the words, and one that is not used, uint32.
        """
        found: int = self._digest(
            sources.ctypes.data, positions.ctypes.data, len(sources), run,
            loops.ctypes.data, len(loops), keys.ctypes.data,
        )  # fmt: skip
        return found


def _kernel_or_reason() -> tuple[Kernel | None, str]:
    library = Path(__file__).with_name("_strided_copy.so")
    if not library.exists():
        return None, "it was not built, because the installation found no working C compiler"
    try:
        return Kernel(library), ""
    except (OSError, AttributeError) as error:  # AttributeError: a library without the function
        return None, f"it cannot be loaded: {error}"


KERNEL, WHY_NO_KERNEL = _kernel_or_reason()
