"""Pauses of vLLM's own scheduler, of which kvferry's connectors learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from support.vllm_scheduler import SETTINGS, VllmScheduler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("connector", [KVFerryConnector, FerryMultiConnector])
def test_the_scheduler_half_learns_that_its_engine_is_paused_and_resumed(connector: Any) -> None:
    told = list[bool]()
    engine = VllmScheduler(connector=connector, settings=SETTINGS[connector])
    ours = engine.connector
    for child in getattr(ours, "_connectors", [ours]):
        if isinstance(child, KVFerryConnector):
            child._half = SimpleNamespace(on_pause=lambda *, paused: told.append(paused))
    for state in (PauseState.PAUSED_NEW, PauseState.UNPAUSED, PauseState.PAUSED_ALL):
        engine.scheduler.set_pause_state(state)
    assert told == [True, False, True]
