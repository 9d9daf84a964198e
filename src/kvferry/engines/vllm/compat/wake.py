"""Wake an idle vLLM engine, whose thread waits for requests, so that it runs a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def find_waker() -> Callable[[], None]:
    """Return a function that makes the engine in whose start this is called run a step soon.

    The engine runs one if its connector then has work (``has_pending_push_work``).
    """
    core = _engine_core()
    if core is None:
        # The engine lives in its client's process, where only the client runs steps.
        return lambda: None
    from vllm.v1.engine import EngineCoreRequestType  # noqa: PLC0415 - the engine has imported it

    return lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _engine_core() -> Any:
    """Return vLLM's EngineCoreProc whose creation led to this call; None if there is none."""
    # vLLM gives a connector no reference to it.
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(found, "input_queue") and hasattr(found, "engines_running"):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
