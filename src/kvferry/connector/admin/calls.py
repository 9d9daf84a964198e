"""Calls of operators that wait for the engine's thread, which owns all state of the connector.

The thread of the HTTP server hands a call over and waits. The engine's thread executes it in its next step.
`wake` makes an idle engine run one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[], Any]


class AdminCalls:
    """A queue of calls from one thread to the engine's thread. Thread-safe."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create an empty queue.

        Args:
            wake: function that makes the engine run a step soon, although it has no requests.
        """
        self._wake = wake
        self._queue: deque[tuple[Call, Future[Any]]] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of calls that the engine's thread has not executed yet."""
        return len(self._queue)

    def execute(self, call: Call, seconds: float) -> Any:
        """Have the engine's thread execute a call, and return its result.

        Args:
            call: function to execute.
            seconds: longest time to wait.

        Raises:
            TimeoutError: the engine has not run a step in this time. The call is then not executed later.
            CancelledError: the engine stops, and does not execute the call.
            Exception: the exception that the call raised.
        """
        future: Future[Any] = Future()
        self._queue.append((call, future))
        if self._closed:
            future.cancel()
        self._wake()
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all waiting calls and all later ones, because the engine runs no more steps."""
        self._closed = True
        for _, future in tuple(self._queue):
            future.cancel()

    def run(self) -> None:
        """Execute all waiting calls. The engine's thread calls this in a step."""
        while self._queue:
            call, future = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)
