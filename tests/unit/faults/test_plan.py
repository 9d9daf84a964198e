"""A plan is the same for the same seed, holds every kind, and mixes only what may be mixed."""

from __future__ import annotations

from collections import Counter

import pytest

from faults.campaign import IN_EVERY_FAMILY, KINDS, switched_off
from faults.mutants import MUTANTS
from faults.plan import plan, possible, rounds
from faults.references import FAMILIES
from faults.values import Area, Fault, Kind

FEW = {
    name: Kind(name, Area.CLIENT, "", None, together, share)
    for name, together, share in (("many", 8, 5), ("three", 3, 2), ("alone", 1, 1))
}


def test_the_same_seed_makes_the_same_plan_and_another_one_another():
    assert plan(7, 50, ["a", "b"], FEW) == plan(7, 50, ["a", "b"], FEW)
    assert plan(7, 50, ["a", "b"], FEW) != plan(8, 50, ["a", "b"], FEW)


def test_every_kind_and_every_family_is_planned():
    found = plan(1, 510, list(FAMILIES), KINDS)
    assert len(found) == 510
    often = Counter(fault.kind for fault in found)
    assert often.keys() == KINDS.keys()
    assert min(often.values()) >= 2
    assert all(fault.family in (KINDS[fault.kind].families or FAMILIES) for fault in found)
    counts = [sum(fault.family == name for fault in found) for name in FAMILIES]
    assert max(counts) - min(counts) < 60


def test_families_share_a_plan_equally():
    found = plan(1, 500, ["a", "b", "c"], FEW)
    counts = [sum(fault.family == name for fault in found) for name in ("a", "b", "c")]
    assert max(counts) - min(counts) <= 1


def test_kinds_that_need_other_families_are_not_possible():
    assert set(KINDS) - set(possible(KINDS, ["gemma3"])) > {"gathering is slow"}
    assert not set(KINDS) - set(possible(KINDS, list(FAMILIES)))


def test_every_protection_is_switched_off_in_some_family_and_some_in_all():
    done: list[str] = []
    for family in FAMILIES:
        done += (here := switched_off(family, [*MUTANTS], done))
        assert {*IN_EVERY_FAMILY} <= {*here}
    assert {*done} == {*MUTANTS}


def test_fewer_faults_than_kinds_are_refused():
    with pytest.raises(ValueError, match="2 faults are planned, there are 3 kinds"):
        plan(1, 2, ["a"], FEW)


def test_fault_has_no_more_company_than_its_kind_allows():
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
