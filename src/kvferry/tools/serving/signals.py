"""Handle SIGINT, SIGTERM and SIGHUP at safe points."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

# A terminal sends it when it is closed. Windows has none.
_HANG_UP = getattr(signal, "SIGHUP", None)
_EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 0}
if _HANG_UP is not None:
    _EXIT_CODES[_HANG_UP] = 129


class StopRequested(Exception):
    """Raised by `StopSignals.check` if a signal asked the process to stop."""


class StopSignals:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP while the ``with`` block runs.

    The first signal is recorded in `received`, and raises KeyboardInterrupt only inside an `interruptible`
    block. A second signal raises KeyboardInterrupt at once, and sets `repeated`. Later signals are ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.repeated = False
        self._interruptible = False
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """Exit code for a process that stops because of the signal `received`; 0 if it is None."""
        return _EXIT_CODES[self.received] if self.received is not None else 0

    def check(self) -> None:
        if self.received is not None:
            raise StopRequested

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first signal raise KeyboardInterrupt inside this ``with`` block.

        Raises:
            StopRequested: a signal was received before the block, or its KeyboardInterrupt was dropped.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False
        self.check()

    def __enter__(self) -> Self:
        # ``nohup`` ignores SIGHUP, and so it stays.
        handled = [number for number in _EXIT_CODES if number != _HANG_UP or not _is_ignored(number)]
        self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal returned it

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._interruptible:
                raise KeyboardInterrupt
        # A third signal must not interrupt the killing of the engines.
        elif not self.repeated:
            self.repeated = True
            raise KeyboardInterrupt


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
