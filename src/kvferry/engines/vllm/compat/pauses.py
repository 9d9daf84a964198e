"""A hook into vLLM's pauses of the scheduler, of which vLLM does not tell connectors."""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

_TELLS = "_kvferry_tells"


def tell_of_pauses() -> None:
    """Patch vLLM's `Scheduler` to call its connector's ``on_pause(paused)`` when it is paused or resumed."""
    pause = Scheduler.set_pause_state
    if getattr(pause, _TELLS, False):
        return

    @wraps(pause)
    def set_pause_state(self: Any, pause_state: PauseState) -> None:
        pause(self, pause_state)
        on_pause = getattr(self.connector, "on_pause", None)
        if on_pause is not None:
            on_pause(pause_state is not PauseState.UNPAUSED)

    setattr(set_pause_state, _TELLS, True)
    Scheduler.set_pause_state = set_pause_state
