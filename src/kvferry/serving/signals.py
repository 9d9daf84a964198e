"""SIGINT and SIGTERM, seen at safe points instead of anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 0}


class StopRequested(Exception):
    """A signal asked to stop."""


class StopSignals:
    """While the block runs, the first signal is only noted; a second raises KeyboardInterrupt where it comes.

    Work that is `interruptible` ends with the first already. Further ones do nothing: what is being killed by
    then must be seen to its end.

    Attributes:
        received: the first signal; None so far.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._raised = False
        self._interruptible = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """Of a process that ends because of what was received."""
        return _EXIT_CODES.get(signal.Signals(self.received), 1) if self.received is not None else 0

    def check(self) -> None:
        """Raise StopRequested if a signal came."""
        if self.received is not None:
            raise StopRequested

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Long work that may be left anywhere: the first signal raises KeyboardInterrupt in it.

        Python drops what is raised in a finalizer, where nobody can catch it: it is seen again at the end.

        Raises:
            StopRequested: a signal came before, or was dropped.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
        self.check()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._interruptible:
                raise KeyboardInterrupt
        elif not self._raised:
            self._raised = True
            raise KeyboardInterrupt
