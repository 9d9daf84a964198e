"""A plan is the same for the same seed, holds every kind, and mixes only what may be mixed."""

from __future__ import annotations

import pytest

from faults.campaign import KINDS
from faults.mutants import MUTANTS
from faults.plan import plan, rounds
from faults.values import Area, Fault, Kind

FEW = {
    name: Kind(name, Area.CLIENT, "", None, together, share)
    for name, together, share in (("many", 8, 5), ("three", 3, 2), ("alone", 1, 1))
}


def test_the_same_seed_makes_the_same_plan_and_another_one_another():
    assert plan(7, 50, ["a", "b"], FEW) == plan(7, 50, ["a", "b"], FEW)
    assert plan(7, 50, ["a", "b"], FEW) != plan(8, 50, ["a", "b"], FEW)


def test_every_kind_and_every_family_is_planned():
    found = plan(1, 500, ["a", "b", "c"], KINDS)
    assert len(found) == 500
    assert {fault.kind for fault in found} == set(KINDS)
    counts = [sum(fault.family == name for fault in found) for name in ("a", "b", "c")]
    assert max(counts) - min(counts) <= 1


def test_fewer_faults_than_kinds_are_refused():
    with pytest.raises(ValueError, match="2 faults are planned, there are 3 kinds"):
        plan(1, 2, ["a"], FEW)


def test_no_fault_has_more_beside_it_than_its_kind_allows():
    faults = plan(3, 200, ["a"], FEW)
    packed = list(rounds(faults, FEW))
    assert sorted(fault.number for each in packed for fault in each) == list(range(200))
    for each in packed:
        assert len(each) <= min(FEW[fault.kind].together for fault in each)
    assert any(len(each) == 8 for each in rounds([Fault(n, "many", "a", 0) for n in range(9)], FEW))


def test_there_are_enough_kinds_from_every_area():
    assert len(KINDS) >= 25
    assert {kind.area for kind in KINDS.values()} == set(Area)
    assert all(kind.says.endswith(".") for kind in KINDS.values())


def test_every_protection_has_a_mutant_and_a_kind_that_catches_it():
    assert {name for kind in KINDS.values() for name in kind.protections} == set(MUTANTS)
