"""Run the commands of sections one after the other, and write their page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.page.results import Result, load, save
from benchmarks.page.run import run
from benchmarks.page.sections import Section
from benchmarks.page.write import write


def measure_page(
    sections: Sequence[Section],
    out: Path,
    results: Path,
    *,
    left_out: Sequence[Section] = (),
    reuse: bool = False,
    quick: bool = False,
    run_command: Callable[[tuple[str, ...]], Result] = run,
) -> list[str]:
    """Measure sections, write their page, and return the names of sections that failed.

    Args:
        sections: sections to measure.
        out: page to write.
        results: folder for the results of sections.
        left_out: sections that the page lists without figures.
        reuse: True to measure only sections that have no result in the folder.
        quick: True to measure for a few minutes only.
        run_command: function that runs a section's command.

    Raises:
        ConfigError: a result in the folder is of another command, machine or version.
        KeyboardInterrupt: the user stopped a command. Earlier results are in the folder.
    """
    commands = {one.name: one.command(quick=quick) for one in sections}
    kept = {name: load(results, name, command) for name, command in commands.items()} if reuse else {}
    measured = []
    for number, section in enumerate(sections, 1):
        result = kept.get(section.name)
        if result is None:
            typed = " ".join(commands[section.name])
            sys.stderr.write(f"section {number} of {len(sections)}, {section.name}: {typed}\n")
            try:
                result = run_command(commands[section.name])
            except KeyboardInterrupt:
                sys.stderr.write(f"stopped; --reuse goes on after the results in {results}\n")
                raise
            save(result, results, section.name)
        measured.append((section, result))
    write(measured, out, left_out=left_out, quick=quick)
    return [section.name for section, result in measured if result.error is not None]
