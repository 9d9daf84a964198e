"""Something that a thread does while the caller does something else: moving a chunk, and digesting it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """A call in a thread of its own; as a context, it is over when that ends, whatever happened.

    Nobody at the end of a process waits for it: a call may hang in a mount.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._made = call, Future[T]()
        self._thread = threading.Thread(target=self._run, name="kvferry-beside", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def result(self) -> T:
        """What the call returned, once it has; raises what it raised."""
        return self._made.result()

    def _run(self) -> None:
        try:
            self._made.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self._made.set_exception(error)


class Arriving:
    """How much has come of what is read from its start on; one thread says it, another waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._come, self._over = 0, False

    def has(self, size: int) -> None:
        """So many bytes have come."""
        with self._changed:
            self._come = size
            self._changed.notify()

    def end(self) -> None:
        """No more will."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def wait(self, size: int) -> None:
        """Until so many bytes have come, or no more will."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._come >= size)
