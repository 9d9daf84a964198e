"""Asynchronous scheduling on a CPU, where vLLM switches it off: a step is scheduled while another runs."""

from __future__ import annotations

from typing import Any


def declare() -> None:
    """Leave ``async_scheduling`` as it was asked for, in this process."""
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config
    if getattr(theirs, "leaves_it_on", False):
        return

    def check(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        theirs(config)
        config.scheduler_config.async_scheduling = wanted

    check.leaves_it_on = True
    CpuPlatform.check_and_update_config = staticmethod(check)


def check(engine: Any, *, wanted: bool) -> None:
    """Raise AssertionError if an engine does not schedule the way it was asked to."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    core = engine.llm_engine.engine_core.engine_core
    found = isinstance(core.scheduler, AsyncScheduler), core.batch_queue is not None
    assert found == (wanted, wanted), f"asynchronous scheduler, overlapping steps: {found}"
