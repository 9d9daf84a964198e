"""Views of a cache that raise where torch would go on with a copy.

A view of a cache is hardly ever contiguous, and on such a view `reshape`, `flatten`, `ravel` and `contiguous`
copy without a word. Writes to the copy are lost, and a transport that registers it serves memory that no
engine writes. On a guarded view these operations raise `SilentCopy` where they would copy, and before they
do: a copy of a whole cache may not fit. Everything else is as on any tensor:

    gives a view                    indexing, permute, view, narrow, reshape where it can: guarded as well
    writes                          in place, `copy_`, `out=`, by assignment: to the buffer
    gives new memory, as it says    clone, gather by index, another dtype or device, arithmetic: not guarded

The guard sees what Python calls (`__torch_function__`). It does not look inside operations, where a copy is
only a means: a matmul reshapes. Hence not `__torch_dispatch__`: there the copy of a reshape, of a clone and
of a matmul are the same call. What leaves torch leaves the guard: numpy, dlpack, a raw pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvferry.errors import SilentCopy

_MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})
"""Operations that torch documents to give a view *or* a copy, and that do not change dtype or device."""


class _GuardedView(torch.Tensor):
    """A tensor over a cache that refuses silent copies. Made by `guard`."""

    @classmethod
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
    """Return a guarded view of the same memory; views made from it are guarded too."""
    return view.as_subclass(_GuardedView)


def unguard(view: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor over the same memory, for code that may copy."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
        return view.as_subclass(torch.Tensor)


def _refuse_copy(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Try the operation on a tensor of the same strides that has no memory: does it give a view of it?

    Raises:
        SilentCopy: it does not.
    """
    keyword = "" if args else "input" if "input" in kwargs else "self"
    view = kwargs[keyword] if keyword else args[0]
    if not isinstance(view, _GuardedView):
        return
    shadow = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
    tried = func(**{**kwargs, keyword: shadow}) if keyword else func(shadow, *args[1:], **kwargs)
    if not _share_memory(tried, shadow):
        raise _silent_copy(name, view)


def _silent_copy(name: str, view: torch.Tensor) -> SilentCopy:
    return SilentCopy(
        f"{name} of a cache view of shape {tuple(view.shape)}, strides {tuple(view.stride())} would copy it, "
        "and writes to the copy are lost; index or permute the view, address the memory by its page map, or "
        "clone() where a copy is meant"
    )


def _rewrap(result: Any, views: Sequence[torch.Tensor]) -> Any:
    """Guard the tensors of a result that share memory with one of the views."""
    if isinstance(result, torch.Tensor) and not isinstance(result, _GuardedView):
        return guard(result) if any(_share_memory(result, view) for view in views) else result
    if type(result) in (list, tuple):
        return type(result)(_rewrap(part, views) for part in result)
    return result


def _guarded(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield guarded views among arguments, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, _GuardedView):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share storage; meta tensors have no addresses to compare."""
    return bool(torch._C._is_alias_of(one, other))  # noqa: SLF001 - torch has no public way to ask
