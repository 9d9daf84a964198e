"""What was seen of a fault is judged without mercy: what has no evidence did not happen."""

from __future__ import annotations

import pytest

from faults.values import Fault, Leaks, Trial, judged, totals

FAULT = Fault(3, "kind", "qwen3", 1)
GOOD = Trial("3 bytes changed", "checksum", answers=2)


def test_a_fault_that_was_injected_detected_and_survived_leaves_no_problem():
    found = totals([judged(FAULT, GOOD)], Leaks())
    assert (found.injected, found.detected, found.recovered) == (1, 1, 1)
    assert not found.problems


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        (Trial("", "checksum", answers=1), "1 of 1 faults not injected"),
        (Trial("bytes", "", answers=1), "1 of 1 faults not detected"),
        (Trial("bytes", "checksum"), "1 of 1 faults not recovered"),
        (Trial("bytes", "checksum", wrong=["a", "b"], answers=1), "2 wrong outputs"),
        (Trial("bytes", "checksum", stuck=["a"], answers=1), "1 stuck requests"),
    ],
)
def test_missing_or_wrong_evidence_is_a_problem(trial, problem):
    assert problem in totals([judged(FAULT, trial)], Leaks()).problems


@pytest.mark.parametrize(
    ("trial", "note"),
    [
        (Trial("bytes", "checksum", told=["r1 Scheduled"]), "bytes; checksum"),
        (
            Trial("bytes", "", told=["r1 Scheduled", "r2 SourceRefused"]),
            "bytes; r1 Scheduled r2 SourceRefused",
        ),
        (Trial("bytes", "", wrong=["r1 is wrong"], told=["r1 Scheduled"]), "r1 is wrong; bytes"),
    ],
)
def test_messages_of_engines_are_shown_if_nothing_else_explains_a_trial(trial, note):
    assert judged(FAULT, trial).note == note


@pytest.mark.parametrize(
    ("leaks", "problem"),
    [
        (Leaks(engine_deaths=1), "1 engine deaths"),
        (Leaks(blocks=2), "2 leaked blocks"),
        (Leaks(shared_memory=3), "3 leaked shared memory"),
        (Leaks(files=4), "4 leaked files"),
    ],
)
def test_leaks_are_a_problem(leaks, problem):
    assert totals([judged(FAULT, GOOD)], Leaks() + leaks).problems == [problem]
