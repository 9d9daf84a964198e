"""How many requests an engine computes in each step, if their loads end one after another."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from support.vllm_engine import parts

_APART_SECONDS = 0.05


def sizes_of_steps(engine: Any, names: list[str], *, waits: bool) -> list[int]:
    """Step until requests of `add` have finished; how many requests each step computed.

    Every result of a lane comes 50 ms after the lane's last one. If the engine `waits`, its steps take so
    long that any wait pays; otherwise no time at all.
    """
    from kvferry.connector import loads
    from kvferry.connector.bids import StepTimes
    from kvferry.transport.lane import Lane

    scheduler, found, done = parts.scheduler(engine), list[int](), set[str]()
    schedule, deliver = scheduler.schedule, Lane._deliver

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        found.append(len(output.num_scheduled_tokens))
        return output

    def deliver_late(lane: Lane, order: Any, report: Any) -> None:
        time.sleep(_APART_SECONDS)
        deliver(lane, order, report)

    seconds = property(lambda _: 60.0 if waits else 0.0, lambda *_: None)
    with (
        mock.patch.object(scheduler, "schedule", scheduled),
        mock.patch.object(Lane, "_deliver", deliver_late),
        mock.patch.object(StepTimes, "small_seconds", seconds, create=True),
        mock.patch.object(loads, "MOST_STEP_SECONDS", 60.0),
    ):
        while not done.issuperset(names):
            done |= {output.request_id for output in engine.llm_engine.step() if output.finished}
    return [size for size in found if size]
