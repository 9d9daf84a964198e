"""Which lines of the handlers a fuzzer has reached: a check that never gets inside finds nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, Self


class Reached:
    """Traces some functions, in this thread and in those that start meanwhile."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        """Args: functions: what handles messages, with the functions defined inside."""
        self._left: dict[CodeType, set[int]] = {}
        for function in functions:
            for code in _codes(function.__code__):
                self._left[code] = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        self.lines = sum(map(len, self._left.values()))

    def __enter__(self) -> Self:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    @property
    def missed(self) -> dict[str, list[int]]:
        """Lines that did not run, by function."""
        return {code.co_qualname: sorted(left) for code, left in self._left.items() if left}

    @property
    def share(self) -> float:
        """Share of all lines that ran."""
        return 1 - sum(map(len, self._left.values())) / self.lines

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        left = self._left.get(frame.f_code)
        if not left:
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            left.discard(frame.f_lineno)
            return line if left else None

        return line


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def functions(*modules: ModuleType) -> list[Callable[..., Any]]:
    """Return the functions that modules define."""
    return [
        one
        for module in modules
        for one in vars(module).values()
        if hasattr(one, "__code__") and one.__module__ == module.__name__
    ]


def methods(*classes: type, without: tuple[str, ...] = ()) -> list[Callable[..., Any]]:
    """Return the functions of classes, without those of some names."""
    return [
        one
        for of in classes
        for name, one in vars(of).items()
        if hasattr(one, "__code__") and name not in without
    ]
