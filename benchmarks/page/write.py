"""Write the page of benchmarks, as Markdown, and its plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.page.figures import CLEARLY_BEHIND, Summary, format_ratio
from benchmarks.page.plot import draw
from benchmarks.page.results import Result
from benchmarks.page.sections import Section
from kvferry.common.errors import ConfigError
from kvferry.common.units import format_age
from kvferry.tools.cli.options import write_file

UNEXPLAINED = "no reason known yet"

_NOT_RUN = "<!-- no command of this page is run: measurements take minutes -->"
"""Tells the test of the documentation's commands not to run those of the page."""

_INTRODUCTION = (
    "Reference: how kvferry compares with other connectors and with limits of the machine. `make bench` "
    "measures it and writes this page. [performance](../docs/performance.md) says how, and what figures do "
    "not show."
)
_SHORTENED = (
    "**Shortened.** These figures are of `--quick`. They show that the benchmarks run. There are too few "
    "rounds for conclusions."
)
_NOT_MEASURED = (
    "**Not measured for this page.** `make bench` measures these sections too. A link leads to the method "
    "and to figures of other runs."
)
_HOW_TO_READ = (
    "**How to read it.** A ratio is kvferry's figure divided by the other one, taken within a round. The "
    "median over rounds is shown, with the range. For times and bytes a ratio below 1 is good, for speeds a "
    "ratio above 1. A **bold** ratio is one where kvferry is behind: every round is worse than 1, or the "
    f"median is worse than 1 by more than a factor of {CLEARLY_BEHIND}. The number after it is that of the "
    "reason. In plots, a bar leads from 1 to the median, and a thin line is the range."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A section of the page.

    Attributes:
        section: the section.
        result: result of its command.
        summary: summary of the result; None if the command failed.
        plot: path of the section's plot, relative to the page; None if there is no plot.
    """

    section: Section
    result: Result
    summary: Summary | None
    plot: str | None


def write(
    measured: Sequence[tuple[Section, Result]], out: Path, *, left_out: Sequence[Section] = (), quick: bool
) -> None:
    """Write the page, and plots to a folder of the same name beside it. Remove plots of failed sections.

    Args:
        measured: sections, at least one, with the results of their commands.
        out: page to write.
        left_out: sections that were not measured. The page lists them.
        quick: True if the measurements were shortened.

    Raises:
        ConfigError: the page or a plot cannot be written.
    """
    folder = out.with_suffix("")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}; name another --out") from error
    entries = []
    for section, result in measured:
        summary = None if result.error is not None else section.summary(result.document)
        plot = folder / f"{section.name}.svg"
        drawn = None if summary is None else draw(summary)
        if drawn is None:
            plot.unlink(missing_ok=True)
        else:
            write_file(plot, drawn)
        link = None if drawn is None else f"{folder.name}/{plot.name}"
        entries.append(Entry(section=section, result=result, summary=summary, plot=link))
    write_file(out, page(entries, left_out=left_out, quick=quick))


def page(entries: Sequence[Entry], *, left_out: Sequence[Section] = (), quick: bool) -> str:
    """Return the text of the page.

    Args:
        entries: sections, at least one, all of the same machine and versions.
        left_out: sections that were not measured.
        quick: True if the measurements were shortened.
    """
    first = entries[0].result
    parts = ["# Benchmarks", _NOT_RUN, _INTRODUCTION, *([_SHORTENED] if quick else [])]
    parts += [
        _contents(entries),
        *([_not_measured(left_out)] if left_out else []),
        f"**Machine.** {_listed(first.machine)}.\n**Versions.** {_listed(first.versions)}.",
        _HOW_TO_READ,
        *(_section(entry) for entry in entries),
    ]
    return "\n\n".join(parts) + "\n"


def _contents(entries: Sequence[Entry]) -> str:
    rows = ["| section | answer | behind |", "|---|---|---|"]
    for one in entries:
        link = f"[{one.section.title}](#{_anchor(one.section.title)})"
        if one.summary is None:
            rows.append(f"| {link} | failed: {_cell(one.result.error or '')} | |")
            continue
        ratios = [each.ratio for each in one.summary.comparisons if each.ratio is not None]
        behind = sum(one.summary.is_behind(ratio) for ratio in ratios)
        rows.append(f"| {link} | {_cell(one.summary.answer)} | {behind} of {len(ratios)} |")
    return "\n".join(rows)


def _not_measured(sections: Sequence[Section]) -> str:
    return "\n".join([
        f"{_NOT_MEASURED}\n",
        *(f"- [{one.title}]({one.method}): {one.question}" for one in sections),
    ])  # fmt: skip


def _section(entry: Entry) -> str:
    section, result = entry.section, entry.result
    parts = [f"## {section.title}", f"*{section.question}*"]
    if entry.summary is None:
        parts.append(f"**Failed.** The command ended with: {_cell(result.error or '')}")
    else:
        parts.append(f"**Answer.** {entry.summary.answer}")
        if entry.plot is not None:
            parts.append(f"![ratios of {section.name}]({entry.plot})")
        reasons = _reasons(section, entry.summary)
        parts.append(_table(entry.summary, reasons))
        if reasons:
            numbered = "\n".join(f"{number}. {text}" for text, number in _numbers(reasons).items())
            parts.append(f"Where kvferry is behind:\n\n{numbered}")
        if entry.summary.notes:
            parts.append("\n".join(f"- {note}" for note in entry.summary.notes))
    parts.append(f"```\n{_typed(result.command)}\n```")
    commit = f" at commit {result.commit}" if result.commit else ""
    parts.append(
        f"It took {format_age(result.seconds)} on {result.date}{commit}. "
        f"[How it is measured]({section.method})."
    )
    return "\n\n".join(parts)


def _reasons(section: Section, summary: Summary) -> dict[int, str]:
    """Return the reason of each comparison in which kvferry is behind, by its index."""
    return {
        number: next((one.text for one in section.reasons if one.explains(comparison)), UNEXPLAINED)
        for number, comparison in enumerate(summary.comparisons)
        if summary.is_behind(comparison.ratio)
    }


def _numbers(reasons: dict[int, str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(reasons.values()), 1)}


def _table(summary: Summary, reasons: dict[int, str]) -> str:
    numbers = _numbers(reasons)
    rows = ["| work | against | kvferry | other | ratio (range) |", "|---|---|---|---|---|"]
    indexed = enumerate(summary.comparisons)
    for label, group in groupby(indexed, key=lambda each: each[1].label):
        shown = label
        for index, one in group:
            ratio = "" if one.ratio is None else format_ratio(one.ratio)
            if index in reasons:
                ratio = f"**{ratio}** [{numbers[reasons[index]]}]"
            cells = map(_cell, (shown, one.against, one.ours, one.theirs))
            rows.append(f"| {' | '.join(cells)} | {ratio} |".replace("|  |", "| |"))
            shown = ""  # a label stands once, before the first of its rows
    return "\n".join(rows)


def _typed(command: tuple[str, ...]) -> str:
    return " ".join(("python -m benchmarks", *command[1:]) if command[0] == "benchmarks" else command)


def _listed(named: dict[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in named.items())


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
