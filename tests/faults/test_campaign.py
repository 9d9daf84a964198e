"""A short campaign against one pair of engines: every kind of fault once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from faults.campaign import KINDS, campaign, drawn
from faults.plan import possible

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SEED = 3


def test_no_fault_makes_an_answer_wrong_a_request_stuck_or_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every kind of fault at least once, against engines of one family."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    count = len(possible(KINDS, ["gemma3"]))
    faults = drawn(SEED, count, ["gemma3"])
    outcome = asyncio.run(campaign(faults, ["gemma3"], tmp_path / "campaign", mutants=False))
    bad = [one for one in outcome.verdicts if not (one.injected and one.detected and one.recovered)]
    assert not outcome.totals.problems, (outcome.totals.problems, bad, outcome.leaks.notes)
