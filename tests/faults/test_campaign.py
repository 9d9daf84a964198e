"""A short campaign against one pair of engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from faults.campaign import KINDS, campaign, drawn
from faults.mutants import MUTANTS
from faults.plan import possible
from faults.references import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SEED = 3
FAMILY = "gemma3"
KINDS_MET = possible(KINDS, [FAMILY])
BESIDE_OTHERS = [name for name, kind in KINDS_MET.items() if kind.together > 1]
ALONE = [
    "ticket lost on its way",
    "sealed grant of another prompt",
    "sealed grant of an ended lease",
    "producer killed",
    "slot reused during the read",
]
"""Some of the kinds of a whole engine. Each takes seconds, because nothing else happens meanwhile."""
CONTROLS = [
    "lease words",
    "verified transfers",
    "digest",
    "sealed digest",
    "ticket",
    "checksum",
    "fleet digest",
]
"""Protections without which the campaign must find something wrong, or it shows nothing with them."""


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([*BESIDE_OTHERS, *ALONE], id="beside others"),
        pytest.param([*KINDS_MET], id="every kind", marks=pytest.mark.long),
    ],
)
def test_faults_cause_no_wrong_answer_stuck_request_or_leak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
) -> None:
    """Each kind of fault once, against engines of one family."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    faults = drawn(SEED, len(kinds), [FAMILY], kinds)
    assert {fault.kind for fault in faults} == {*kinds}
    outcome = asyncio.run(campaign(faults, [FAMILY], tmp_path / "campaign", CONTROLS))
    bad = [one for one in outcome.verdicts if not (one.injected and one.detected and one.recovered)]
    assert not outcome.totals.problems, (outcome.totals.problems, bad, outcome.leaks.notes)
    assert [one for one, _ in outcome.caught] == CONTROLS
    assert all(outcome.caught.values()), [one for one, found in outcome.caught.items() if not found]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES]
)
def test_a_fourth_of_500_faults_causes_no_damage_and_each_protection_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    outcome = asyncio.run(campaign(drawn(SEED, 125, [family]), [family], tmp_path / "campaign", [*MUTANTS]))
    assert not outcome.totals.problems, (outcome.totals.problems, outcome.leaks.notes)
    assert all(outcome.caught.values()), [one for one, found in outcome.caught.items() if not found]
