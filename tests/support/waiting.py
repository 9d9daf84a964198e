"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Fail if the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)
