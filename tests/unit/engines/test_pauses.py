"""Pauses of vLLM's own scheduler, of which kvferry's connectors learn."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from kvferry.connector.peers.producer import Producer
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from support.vllm_scheduler import SETTINGS, VllmScheduler

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("connector", [KVFerryConnector, FerryMultiConnector])
def test_the_producer_learns_that_its_engine_is_paused_and_resumed(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[bool]()
    monkeypatch.setattr(Producer, "on_pause", lambda _, *, paused: told.append(paused))
    engine = VllmScheduler(connector=connector, settings=SETTINGS[connector])
    for state in (PauseState.PAUSED_NEW, PauseState.UNPAUSED, PauseState.PAUSED_ALL):
        engine.scheduler.set_pause_state(state)
    assert told == [True, False, True]
