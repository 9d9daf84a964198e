"""Mutants are drawn by a seed, and planted behind a switch."""

from pathlib import Path

from support.mutants.draw import SWITCH, draw

SOURCE = '''"""A module."""

from __future__ import annotations


def larger(one: int, other: int) -> int:
    if one > other:
        return one
    return other
'''


def planted(tmp_path: Path, seed: int):
    folder = tmp_path / "package" / "planning"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "values.py").write_text(SOURCE)
    return draw(tmp_path / "package", ["planning"], seed, 2)


def test_same_seed_draws_the_same_mutants(tmp_path: Path) -> None:
    assert planted(tmp_path, 1) == planted(tmp_path, 1)
    assert len({str(planted(tmp_path, seed)) for seed in range(9)}) > 1


def test_mutant_changes_the_answer_only_when_it_is_on(tmp_path: Path) -> None:
    for seed in range(5):
        mutants, texts = planted(tmp_path, seed)
        code = texts["planning/values.py"].replace("from kvferry.mutant_switch import on as _mutant_on", "")
        on: list[int] = []
        names = {"_mutant_on": lambda number, on=on: number in on}
        exec(code, names)  # a module of the test's own
        for mutant in mutants:
            on[:] = []
            assert [names["larger"](*pair) for pair in ((1, 2), (2, 1), (2, 2))] == [2, 2, 2]
            on[:] = [mutant.number]
            assert [names["larger"](*pair) for pair in ((1, 2), (2, 1), (2, 2))] != [2, 2, 2] or (
                ">=" in mutant.text
            ), "2 >= 2 gives the same"


def test_switch_notes_which_test_reaches_a_mutant(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVFERRY_MUTANT_LOG", str(tmp_path))
    monkeypatch.setenv("KVFERRY_MUTANT", "3")
    names = {}
    exec(SWITCH, names)  # the module that every copy gets
    assert names["on"](3)
    assert not names["on"](4)
    assert "test_switch_notes_which_test_reaches_a_mutant" in (tmp_path / "3").read_text()
