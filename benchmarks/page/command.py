"""`python -m benchmarks page`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import parse_names


def page(
    only: Annotated[
        str | None, typer.Option(help="Sections to measure and to write, separated by commas. [default: all]")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder for the results of sections. [default: benchmarks, in the user's cache]"),
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Measure only sections that have no result in the folder.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Page to write. Plots go to a folder of the same name beside it.")
    ] = Path("benchmarks/figures.md"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure for a few minutes only. The page says so.")
    ] = False,
) -> None:
    """Run benchmarks one after the other, and write a page with a table and a plot for each.

    It takes less than an hour and needs a machine that does nothing else. A benchmark that fails has its
    error on the page, and the exit status is then 1.
    """
    from benchmarks.page.measure import measure_page
    from benchmarks.page.sections import SECTIONS
    from kvferry.common.files import user_cache

    if out.suffix != ".md":
        raise ConfigError(f"--out {out} is not an .md file; name one")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; create it, or name another")
    names = parse_names(only, [one.name for one in SECTIONS], "only") if only else None
    failed = measure_page(
        [one for one in SECTIONS if names is None or one.name in names],
        out,
        user_cache() / "benchmarks" if results is None else results,
        left_out=[one for one in SECTIONS if names is not None and one.name not in names],
        reuse=reuse,
        quick=quick,
    )
    print(f"written: {out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if failed:
        raise typer.Exit(1)
