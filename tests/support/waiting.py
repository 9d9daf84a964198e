"""Waiting for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """Return the first true answer of `condition`. Fail if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"still {answer!r} after {seconds:g} s"
        time.sleep(0.01)
    return answer
