"""What must hold while odd messages arrive, whatever they are."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GROWTH_BYTES = 64 << 20
"""Of a whole run: eight messages of 6 MiB that wait in the fuzzer's own queue, and pieces of freed memory."""
MOST_HELD = 0.6
"""Of the bytes of messages that are repeated: they are heard and dropped, so nothing of them may stay."""
MOST_OBJECTS = 0.01
"""Python's objects per message that is repeated, beside those that come and go."""
_REPEATED, _REPEATED_BYTES = 10_000, 8 << 20
_LIBC = ctypes.CDLL(None)
MOST_CPU_SECONDS = 0.5
"""Of one message, under the tracer of lines, which makes handlers several times slower."""


def seconds(default: float = 10.0) -> float:
    """Return how long one fuzzer of the long list runs."""
    return float(os.environ.get("KVFERRY_FUZZ_SECONDS", default))


def seed() -> int:
    """The seed of one run."""
    return int(os.environ.get("KVFERRY_FUZZ_SEED", "1"))


def memory() -> int:
    """Resident bytes of this process, without what the allocator can give back."""
    gc.collect()
    _LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def holds_nothing(repeat: Callable[[], tuple[int, int]], heard: Callable[[], object]) -> None:
    """Judge the memory that repeated messages leave behind.

    Args:
        repeat: sends the same messages once more; returns how many there are, and how many bytes.
        heard: returns when all that was sent has been heard.
    """
    repeat()  # the largest room that they need
    heard()
    began, objects = memory(), sys.getallocatedblocks()
    messages = size = 0
    while size < _REPEATED_BYTES or messages < _REPEATED:
        more, longer = repeat()
        messages, size = messages + more, size + longer
    heard()
    grown, objects = memory() - began, sys.getallocatedblocks() - objects
    print(f"{messages} repeated messages, {size >> 20} MiB: {grown >> 10} KiB and {objects} objects more")
    assert grown < MOST_HELD * size
    assert objects < 1000 + MOST_OBJECTS * messages


class Costs:
    """CPU seconds of the calls of a handler, in its thread."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self.calls, self.most = 0, 0.0

    def __call__(self, *args: Any) -> Any:
        began = time.thread_time()
        try:
            return self._handler(*args)
        finally:
            self.calls += 1
            self.most = max(self.most, time.thread_time() - began)


@contextmanager
def judged(caplog: Any, *costs: Costs, long: bool = True) -> Iterator[None]:
    """Judge what happens inside: threads live, memory and descriptors stay, nothing unexpected is logged.

    CPU time is judged only in a long run.
    """
    before = {one.name for one in threading.enumerate()}
    began, files = memory(), descriptors()
    yield
    lost = before - {one.name for one in threading.enumerate()}
    assert not lost, f"threads have ended: {lost}"
    unexpected = [record.getMessage() for record in caplog.records if "unexpected" in record.getMessage()]
    assert not unexpected, caplog.text[-5000:]
    assert len(caplog.text) < 100_000
    assert memory() - began < GROWTH_BYTES
    assert descriptors() - files < 64
    for one in costs:
        assert one.calls
        assert not long or one.most < MOST_CPU_SECONDS, f"a message took {one.most:.3f} s of CPU"
