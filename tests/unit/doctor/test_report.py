import io
import json

import pytest
from rich.console import Console

from kvferry.tools.doctor import finding as report
from kvferry.tools.doctor.finding import Finding, ReportSection, State, bad, from_error, is_well, note, ok

LONG = "word " * 40 + "/a/path/that/is/far/longer/than/any/line/" + "of-a-terminal/" * 8
SECTIONS = [
    ReportSection("this machine", (ok("one", LONG), note("two", "worth\x1b[31m a look", "look " * 30))),
    ReportSection("engine", (bad("three", "is wrong", "mend it"),)),
]


def shown(sections) -> str:
    out = io.StringIO()
    report.print_report(sections, Console(file=out, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 57, 80])
def test_a_report_fits_its_width(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, shown(SECTIONS).splitlines())) <= width


def test_a_finding_is_one_plain_line_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = shown(SECTIONS)
    assert f"  ok   one: {LONG}" in text.splitlines()
    assert "\x1b" not in text
    assert "worth?[31m a look" in text


def test_a_report_says_what_to_do_and_ends_with_what_it_comes_to():
    lines = shown(SECTIONS).splitlines()
    assert "  BAD  three: is wrong" in lines
    assert "       -> mend it" in lines
    assert lines[-1] == "1 of 3 checks found something to fix; 1 worth a look."
    assert shown(SECTIONS[:1]).splitlines()[-1] == "Nothing to fix; 1 worth a look."


def test_json_has_the_same():
    found = json.loads(json.dumps(report.as_json(SECTIONS)))
    assert found["well"] is False
    assert found["sections"][1]["findings"] == [
        {"subject": "three", "state": "bad", "found": "is wrong", "advice": "mend it"}
    ]


def test_only_what_is_bad_is_not_well():
    assert is_well(SECTIONS[:1])
    assert not is_well(SECTIONS)


def test_a_bad_finding_needs_advice():
    with pytest.raises(ValueError, match="what is bad says what to do"):
        Finding("it", State.BAD, "is wrong")


def test_kvferrys_own_errors_are_split_into_what_is_and_what_to_do():
    assert from_error("port", ValueError("a; b; do c")) == bad("port", "a; b", "do c")
    assert from_error("port", ValueError("a"), "do c") == bad("port", "a", "do c")
