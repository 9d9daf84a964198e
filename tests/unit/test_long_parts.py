"""`make test-all`: parts, shares, and the record."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.long import record, run
from support.long.record import BEGIN, Machine, PartRecord, read_record, table_of, write_record
from support.long.run import main, parts

ROOT = Path(__file__).parents[2]
RAN = PartRecord(
    commit="0123456789abcdef",
    date="2026-11-28",
    machine=Machine("Some processor", 2, 24, ("avx2",)),
    seconds=90,
    passed=7,
    failed=1,
    skipped=2,
    failures=("tests.unit.test_x::test_y",),
)


def collected(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_shares_divide_the_tests_and_keep_those_of_one_engine_together() -> None:
    folder = "tests/unit/keys"
    shares = [collected(folder, f"--share={number}/2") for number in (1, 2)]
    assert all(shares)
    assert sorted(shares[0] + shares[1]) == sorted(collected(folder))
    files = [{name.partition("::")[0] for name in share} for share in shares]
    assert not files[0] & files[1]


def test_paths_of_parts_exist() -> None:
    for part in parts().values():
        for argument in part.command:
            path = argument.removeprefix("--ignore=")
            assert not path.startswith("tests/") or (ROOT / path).exists(), path


def test_unknown_part_is_one_sentence_with_the_nearest_name(capsys) -> None:
    assert main(["family-3"]) == 2
    said = capsys.readouterr().err
    assert said == "test-all: no part is called 'family-3'; did you mean families-3? --list has all\n"


def test_record_is_read_as_it_was_written_and_the_page_keeps_its_head(tmp_path: Path) -> None:
    path, page = tmp_path / "record.json", tmp_path / "record.md"
    page.write_text(f"# Head\n\n{BEGIN}\nold\n")
    assert read_record(path) == {}
    write_record({"unit": RAN}, path, page)
    assert read_record(path) == {"unit": RAN}
    assert page.read_text() == f"# Head\n\n{BEGIN}\n\n{table_of({'unit': RAN})}"


def test_table_shows_commit_counts_minutes_and_failures() -> None:
    text = table_of({"unit": RAN, "fuzz": replace(RAN, commit="0123456789abcdef+", failed=0, failures=())})
    assert "| unit | `01234567` | 2026-11-28 | 1.5 | 7 | 2 | 1 |" in text
    assert "| fuzz | `01234567+` | 2026-11-28 | 1.5 | 7 | 2 | 0 |" in text
    assert "- unit: `tests.unit.test_x::test_y`" in text


def test_only_parts_that_did_not_run_on_this_commit_run(tmp_path: Path, monkeypatch) -> None:
    ran = []
    known = {name: run.Part(()) for name in ("one", "two")}
    monkeypatch.setattr(run, "parts", lambda: known)
    monkeypatch.setattr(run, "is_unchanged_since", lambda commit: commit == RAN.commit)
    monkeypatch.setattr(run, "run_part", lambda part: (ran.append(part), (record.Counts(1, 0, ()), 1))[1])
    monkeypatch.setattr(run, "read_record", lambda: {"one": RAN})
    written = []
    monkeypatch.setattr(run, "write_record", written.append)
    assert main([]) == 0
    assert ran == [known["two"]]
    assert [*written[-1]] == ["one", "two"]


def test_part_whose_tests_do_not_run_is_a_failure() -> None:
    counts, _ = run.run_part(run.Part((sys.executable, "-c", "")))
    assert counts.failures == ("pytest did not run to its end",)


@pytest.mark.slow
def test_part_that_is_stopped_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "test_stopped.py"
    path.write_text("def test_one(): pass\ndef test_two(): raise KeyboardInterrupt\n")
    counts, _ = run.run_part(run.Part((sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path))))
    assert counts.failures == ("stopped with exit code 2 before its end",)


def test_tree_is_unchanged_since_its_own_commit_only() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("no git repository here")
    assert not run.is_unchanged_since(head.stdout.strip() + "+")
    assert not run.is_unchanged_since("0" * 40)
