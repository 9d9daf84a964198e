"""Tensor views of memory: by address, because plans contain addresses, and guarded against silent copies."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.common.errors import SilentCopy, TransferError
from kvferry.geometry import Region
from kvferry.planning.strided_copy import StridedCopy

# Operations that torch allows to return a view *or* a copy, with the same dtype and device.
_MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _CudaBytes:
    """GPU memory in a form that ``torch.as_tensor`` accepts (the CUDA array interface)."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.length,), "typestr": "|u1", "data": (region.address, False), "version": 3,
        }  # fmt: skip


def tensor_over(region: Region) -> torch.Tensor:
    """Return a tensor over the memory of a region, uint8 of shape (length,)."""
    if region.memory == "VRAM":
        return torch.as_tensor(_CudaBytes(region), device=f"cuda:{region.device}")
    memory = (ctypes.c_uint8 * region.length).from_address(region.address)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


def region_over(tensor: torch.Tensor) -> Region:
    """Return the region of a contiguous tensor's memory."""
    kind, device = ("VRAM", tensor.device.index) if tensor.is_cuda else ("DRAM", 0)
    return Region(tensor.data_ptr(), tensor.nbytes, kind, device)


class AddressSpace:
    """Tensor views of registered regions by address. The caller must keep the memory allocated."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]
        self._words: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, copy: StridedCopy, side: str, stride: int, count: int, word: int) -> torch.Tensor:
        """Return a view of the bytes that a strided copy touches on one side, "src" or "dst".

        Args:
            copy: its start on `side` is the absolute address of the first run in the first block or cell.
            stride: bytes from one block or packed cell to the next.
            count: number of blocks or packed cells.
            word: size in bytes of an element of the view: 1, 2, 4 or 8 (`largest_word`).

        Return a tensor of shape (count, count of every loop, elements of a run) that shares the memory. Raise
        TransferError if it exceeds the registered memory, or spans the memory of several devices.
        """
        first = copy.src if side == "src" else copy.dst
        distances = [loop.src if side == "src" else loop.dst for loop in copy.loops]
        counts = [loop.count for loop in copy.loops]
        extents = [(n - 1) * d for n, d in zip((count, *counts), (stride, *distances), strict=True)]
        low, high = (
            first + sum(min(r, 0) for r in extents),
            first + sum(max(r, 0) for r in extents) + copy.run,
        )
        shape = (count, *counts, copy.run // word)
        strides = (stride // word, *(d // word for d in distances), 1)
        if (at := self._region_of(low, high)) is not None:
            offset = first - self._starts[at]
            return self._flat(at, word).as_strided(shape, strides, offset // word)
        axes = sorted(zip((stride, *distances), (count, *counts), strict=True), key=lambda axis: abs(axis[0]))
        held = self._regions_of(low, axes, copy.run)
        if held is None or len(places := {(region.memory, region.device) for region in held}) > 1:
            raise TransferError(f"bytes [{low}, {high}) are not in registered memory")
        # Each layer of a group may be a separate allocation. The view spans them all, but the bytes between
        # them are never accessed.
        memory, device = places.pop()
        flat = tensor_over(Region(low, high - low, memory, device)).view(_WORDS[word])
        return flat.as_strided(shape, strides, (first - low) // word)

    def _region_of(self, low: int, high: int) -> int | None:
        """Return the index of the region that contains addresses from `low` to `high` (excluded), or None."""
        at = bisect.bisect_right(self._starts, low) - 1
        holds = at >= 0 and high <= self._starts[at] + self._regions[at].length
        return at if holds else None

    def _regions_of(self, low: int, axes: Sequence[tuple[int, int]], run: int) -> set[Region] | None:
        """Return the regions that contain runs of `run` bytes, the lowest at `low`; None if they do not.

        `axes` are (distance in bytes, number of runs), the shortest distance first.
        """
        high = low + sum(abs(distance) * (count - 1) for distance, count in axes) + run
        if (at := self._region_of(low, high)) is not None:
            return {self._regions[at]}
        if not axes:
            return None
        found: set[Region] = set()
        *inner, (distance, count) = axes
        for number in range(count):
            held = self._regions_of(low + number * abs(distance), inner, run)
            if held is None:
                return None
            found |= held
        return found

    def _flat(self, at: int, word: int) -> torch.Tensor:
        if (at, word) not in self._words:
            # A tensor of words has whole words only. The bytes after the last are in the view of bytes.
            whole = self._regions[at].length // word * word
            self._words[at, word] = tensor_over(self._regions[at])[:whole].view(_WORDS[word])
        return self._words[at, word]

    @property
    def on_host(self) -> bool:
        return all(region.memory == "DRAM" for region in self._regions)

    def bytes_at(self, address: int) -> tuple[npt.NDArray[np.uint8] | torch.Tensor, int]:
        """Return the memory of an address's region, an array or on a GPU a tensor, and its offset there."""
        at = max(bisect.bisect_right(self._starts, address) - 1, 0)
        flat = self._flat(at, 1)
        return flat.numpy() if self.on_host else flat, address - self._starts[at]

    def base(self, address: int) -> int:
        """Return the start address of the region that contains `address`, which must lie in a region."""
        return self._starts[max(bisect.bisect_right(self._starts, address) - 1, 0)]


def largest_word(copy: StridedCopy, *offsets: Any) -> int:
    """Return the largest element size, 8, 4, 2 or 1, that divides runs, strides and `offsets` in bytes."""
    numbers = [copy.run, *offsets]
    numbers += [n for loop in copy.loops for n in (loop.src, loop.dst)]
    return gcd(8, *(int(n) for n in numbers))


class _GuardedView(torch.Tensor):
    """A view of a KV cache that raises `SilentCopy` where torch would silently copy.

    Writes to such a copy are lost, and a transport that registers it serves memory that no engine writes.
    Copies inside of operations, such as those of a matmul, are allowed.
    """

    @classmethod
    # Calls from Python. `__torch_dispatch__` could not tell the copies of a reshape, a clone and a matmul
    # apart.
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documented way past a subclass
            name = getattr(func, "__name__", "").partition(".")[0]
            if name in _MAY_COPY:
                _refuse_copy(func, name, args, kwargs)
            result = func(*args, **kwargs)
            return _rewrap(result, list(_guarded((*args, *kwargs.values()))))


def guard(view: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory that raises `SilentCopy`, as its own views do."""
    return view.as_subclass(_GuardedView)


def _refuse_copy(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `SilentCopy` if an operation on a guarded view would return a copy."""
    keyword = "" if args else "input" if "input" in kwargs else "self"
    view = kwargs[keyword] if keyword else args[0]
    if not isinstance(view, _GuardedView):
        return
    # Tried on a tensor without memory: a copy of a whole cache may not fit.
    shadow = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
    tried = func(**{**kwargs, keyword: shadow}) if keyword else func(shadow, *args[1:], **kwargs)
    if not _share_memory(tried, shadow):
        raise SilentCopy(
            f"{name} of a cache view of shape {tuple(view.shape)}, strides {tuple(view.stride())} would copy "
            "it, and writes to the copy are lost; index or permute the view, address the memory by its page "
            "map, or clone() where a copy is meant"
        )


def _rewrap(result: Any, views: Sequence[torch.Tensor]) -> Any:
    """Return the result of an operation, in which all tensors that share memory with `views` are guarded."""
    if isinstance(result, torch.Tensor) and not isinstance(result, _GuardedView):
        return guard(result) if any(_share_memory(result, view) for view in views) else result
    if type(result) in (list, tuple):
        return type(result)(_rewrap(part, views) for part in result)
    return result


def _guarded(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, _GuardedView):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Also for meta tensors, which have no addresses.
    return bool(torch._C._is_alias_of(one, other))  # noqa: SLF001 - torch has no public way to ask
