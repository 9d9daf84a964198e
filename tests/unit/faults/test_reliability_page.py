"""What docs/reliability.md says is there is there, and its generated parts can be written."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from faults.campaign import KINDS
from faults.mutants import MUTANTS
from faults.report import campaign_part, with_part
from faults.values import Fault, Leaks, Trial, judged, totals

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"`(tests/[\w/.]+\.py)::(\w+)`")


def test_every_test_that_the_page_names_exists():
    named = NAMED.findall(PAGE)
    assert len(named) > 20
    missing = [f"{file}::{name}" for file, name in named if name not in _tests(ROOT / file)]
    assert not missing


def _tests(file: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.Assign)
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    names = {node.name for node in found if isinstance(node, ast.FunctionDef)}
    assigned = [target for node in found if isinstance(node, ast.Assign) for target in node.targets]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_every_public_report_has_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert len(rows) > 20
    assert all(NAMED.search(row) for row in rows)


def test_page_shows_the_kinds_of_faults_and_protections_of_the_present_campaign():
    """It is older than the campaign otherwise: `make faults SEED=1 FAULTS=540` writes it again."""
    part = PAGE.split("<!-- faults: ")[1].split("<!-- end of faults -->")[0]
    shown, area = set(), ""
    for line in part.splitlines():
        area = line.removeprefix("### ") if line.startswith("### ") else area
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3:
            shown.add((area, cells[0], cells[1]))
    kinds = {(str(kind.area), kind.name, kind.says) for kind in KINDS.values()}
    assert {row for row in shown if row[1] not in {"kind of fault", "---", "protection", *MUTANTS}} == kinds
    assert {row[1] for row in shown} >= {*MUTANTS}


@pytest.mark.long
def test_page_was_written_on_the_present_code():
    """It is older than the code otherwise: `make faults SEED=1 FAULTS=540` writes it again."""
    (commit,) = re.findall(r"ran on commit `(\w+)`", PAGE)
    code = ("src", "tests/faults", "tests/support")
    command = ["git", "log", "--oneline", f"{commit}..HEAD", "--", *code]
    since = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not since, f"changes since the campaign:\n{since}"


def test_campaigns_part_of_the_page_is_replaced_between_its_marks():
    verdict = judged(Fault(0, "preemption", "qwen3", 1), Trial("2 preemptions", "2 | answers", answers=1))
    missed = judged(Fault(1, "stolen offer", "qwen3", 1), Trial("1 offer", "", answers=1))
    body = campaign_part(
        "make faults",
        "01234567",
        {"qwen3": 1e-4},
        KINDS,
        [verdict, missed],
        totals([verdict, missed], Leaks()),
        {("pins", "qwen3"): "a|b; c", ("pins", "dsv3"): "d"},
        90.0,
    )
    written = with_part(PAGE, "faults", body)
    assert "on commit `01234567`" in written
    assert "### engines" in written
    assert "preempts requests it has loaded. | 1 |" in written
    assert "that another request has used up. | 1, 0, 1 |" in written
    assert "| wrong outputs | 0 |" in written
    assert "| pins | qwen3, dsv3 | a/b |" in written
    assert with_part(written, "faults", "") == with_part(PAGE, "faults", "")


def test_a_page_without_the_part_is_refused():
    with pytest.raises(ValueError, match="has no part 'faults'"):
        with_part("nothing", "faults", "x")
