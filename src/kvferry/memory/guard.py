"""Tensor views of a KV cache that raise an error instead of silently copying.

A view of a cache is rarely contiguous, and on such a view `reshape`, `flatten`, `ravel` and `contiguous` copy
silently. Writes to the copy are lost. A transport that registers the copy serves memory that no engine
writes. On a guarded view these operations raise `SilentCopy`. All other operations work as on any tensor:

    return a view                   indexing, permute, view, narrow, reshape if possible: guarded as well
    write to the buffer             in place, `copy_`, `out=`, by assignment
    return new memory               clone, gather by index, another dtype or device, arithmetic: not guarded

The guard ignores copies inside operations, such as those of a matmul. It does not protect memory outside
torch: numpy arrays, dlpack capsules, raw pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvferry.errors import SilentCopy

# Operations that torch allows to return a view *or* a copy, with the same dtype and device.
_MAY_COPY = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})


class _GuardedView(torch.Tensor):
    """A view of a KV cache that raises `SilentCopy` where torch would silently copy."""

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
    """Return a view of the same memory that raises `SilentCopy` where torch would silently copy.

    Views of the returned view are guarded in the same way.
    """
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
        raise _silent_copy(name, view)


def _silent_copy(name: str, view: torch.Tensor) -> SilentCopy:
    return SilentCopy(
        f"{name} of a cache view of shape {tuple(view.shape)}, strides {tuple(view.stride())} would copy it, "
        "and writes to the copy are lost; index or permute the view, address the memory by its page map, or "
        "clone() where a copy is meant"
    )


def _rewrap(result: Any, views: Sequence[torch.Tensor]) -> Any:
    """Return the result of an operation, in which all tensors that share memory with `views` are guarded."""
    if isinstance(result, torch.Tensor) and not isinstance(result, _GuardedView):
        return guard(result) if any(_share_memory(result, view) for view in views) else result
    if type(result) in (list, tuple):
        return type(result)(_rewrap(part, views) for part in result)
    return result


def _guarded(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the guarded views among the arguments of an operation, including nested lists and tuples."""
    for value in values:
        if isinstance(value, _GuardedView):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share storage. This also works for meta tensors, which have no addresses."""
    return bool(torch._C._is_alias_of(one, other))  # noqa: SLF001 - torch has no public way to ask
