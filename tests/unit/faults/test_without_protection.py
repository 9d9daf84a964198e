"""What counts as found when a protection is switched off."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest

from faults import campaign
from faults.kinds import KINDS
from faults.references import FAMILIES
from faults.stage import Stage
from faults.values import Fault, Trial
from support.vllm_engine.process import EngineError

LATE = "late bytes land among others"


class FakeEngine:
    """An engine whose commands do nothing until it has died."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.died = ""

    async def do(self, *_: Any) -> int:
        if self.died:
            raise EngineError(self.died)
        return 0

    def deafen(self) -> None:
        pass

    kill = deafen


class FakeStage(Stage):
    """A stage whose engines are fakes."""

    def _engine(self, role: str) -> Any:
        return FakeEngine()

    async def _ready(self, *engines: Any) -> None:
        pass

    async def make_ready(self) -> None:
        await self.replace_dead()

    async def rest(self) -> Any:
        return {}


@pytest.mark.parametrize(
    ("death", "found"),
    [("Traceback\nAssertionError; see a.log", "an engine died: AssertionError"), ("", "")],
)
def test_an_engine_that_dies_without_a_protection_shows_that_it_is_needed(
    tmp_path, monkeypatch, death: str, found: str
):
    async def trial(stage: Stage, _: Fault) -> Trial:
        stage.decode.died = death
        return Trial()

    monkeypatch.setitem(KINDS, LATE, replace(KINDS[LATE], trial=trial))
    references: Any = None
    stage = FakeStage(FAMILIES["gemma3"], references, tmp_path)
    stage.prefill, stage.decode = FakeEngine(), FakeEngine()  # type: ignore[assignment]
    answer = asyncio.run(campaign.without(stage, "pins"))
    assert answer == (f"{LATE}: {found}" if found else "")
    assert not stage.decode.died
    assert not stage._deaths, "it died of what was switched off"
