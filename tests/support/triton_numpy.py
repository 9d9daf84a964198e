"""Triton's language over numpy, for kernels that compute indices: all programs, one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np


class Tensor(np.ndarray):
    """What a kernel loads."""

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype)


@dataclass(frozen=True)
class Pointer:
    """Elements of an array from an index on, or at indices."""

    array: np.ndarray
    at: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.at + more)


def run(kernel: Callable[..., None], module: Any, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
    """Run a kernel, whose `module` calls Triton's language ``tl``. Arrays among `args` become pointers."""
    pointers = [Pointer(arg.reshape(-1)) if isinstance(arg, np.ndarray) else arg for arg in args]
    theirs = module.tl
    try:
        for ids in product(*map(range, grid)):
            module.tl = _language(ids, grid)
            kernel(*pointers, **more)
    finally:
        module.tl = theirs


def _language(ids: tuple[int, ...], grid: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        program_id=lambda axis: ids[axis],
        num_programs=lambda axis: grid[axis],
        arange=np.arange,
        where=np.where,
        load=_load,
        store=_store,
        int32=np.int32,
        int64=np.int64,
    )


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    found = pointer.array[np.where(mask, pointer.at, 0)]
    if isinstance(found, Pointer):
        return found
    return np.where(mask, found, np.asarray(other, found.dtype)).view(Tensor)


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, mask = np.broadcast_arrays(pointer.at, value, mask)
    pointer.array[at[mask]] = value[mask]
