"""Print the findings as text of at most 80 columns, or return them as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from kvferry.tools.doctor.finding import ReportSection, State, is_well
from kvferry.terminal import wrapped
from kvferry.units import counted

_MARKS = {State.OK: "ok", State.NOTE: "note", State.BAD: "BAD"}
_STYLES = {State.OK: "green", State.NOTE: "yellow", State.BAD: "bold red"}
_INDENT = 7
_ARROW = "-> "


def print_report(sections: Sequence[ReportSection], console: Console) -> None:
    """Print all sections of the report and a summary line to `console`."""
    for section in sections:
        # Wrapped here and not by rich, which would separate numbers from their units.
        for line in wrapped(section.title):
            console.print(Text(line, "bold"), soft_wrap=True)
        for finding in section.findings:
            first, *rest = wrapped(f"{finding.subject}: {finding.found}", _INDENT)
            mark = Text(f"  {_MARKS[finding.state]:<{_INDENT - 2}}", _STYLES[finding.state])
            console.print(mark + Text(first.strip()), soft_wrap=True)
            for line in rest:
                console.print(Text(line), soft_wrap=True)
            if finding.advice:
                for line in wrapped(_ARROW + finding.advice, _INDENT, len(_ARROW)):
                    console.print(Text(line), soft_wrap=True)
        console.print()
    for line in wrapped(summary(sections)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def summary(sections: Sequence[ReportSection]) -> str:
    """Return the summary line of the report, with the number of findings to fix."""
    counts = Counter(finding.state for section in sections for finding in section.findings)
    noted = f"; {counts[State.NOTE]} worth a look" if counts[State.NOTE] else ""
    if not counts[State.BAD]:
        return f"Nothing to fix{noted}."
    return f"{counts[State.BAD]} of {counted(counts.total(), 'check')} found something to fix{noted}."


def as_json(sections: Sequence[ReportSection]) -> dict[str, Any]:
    """Return the report as a dict that can be written as JSON.

    The key ``well`` is True if nothing must be fixed. The key ``sections`` has the findings under their
    headings.
    """
    return {
        "well": is_well(sections),
        "sections": [
            {"title": section.title, "findings": [asdict(finding) for finding in section.findings]}
            for section in sections
        ],
    }
