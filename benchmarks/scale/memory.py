"""Measure the memory that objects occupy."""

from __future__ import annotations

import gc
import multiprocessing
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection

from kvferry.common.errors import TransferError

_PATIENCE_SECONDS = 120.0


def traced_bytes(make: Callable[[], object]) -> int:
    """Return the bytes that Python and numpy allocate for an object, by tracemalloc.

    Args:
        make: function that makes the object and returns it. It returns everything that it keeps.
    """
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = make()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        del made
    finally:
        tracemalloc.stop()
    return after - before


def in_new_process(measure: Callable[[int], float], size: int) -> float:
    """Run a measurement in a process of its own, which has no freed memory to use again. Return its result.

    Args:
        measure: function of a module, which takes the size.
        size: argument of the function.

    Raises:
        TransferError: the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, measure, size), name="bench-scale", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PATIENCE_SECONDS):
            raise TransferError(f"a process that measures memory did not end in {_PATIENCE_SECONDS:g} s")
        found: float = ours.recv()
    except EOFError as error:
        raise TransferError("a process that measures memory died") from error
    finally:
        ours.close()
        process.join(1.0)
        if process.is_alive():
            process.kill()
    return found


def _answer(pipe: Connection, measure: Callable[[int], float], size: int) -> None:
    pipe.send(measure(size))
