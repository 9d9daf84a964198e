"""`python -m benchmarks layout`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvferry.common.errors import ConfigError
from kvferry.tools.cli.bench import REPEATS_HELP, TRANSPORTS_HELP, parse_layouts, progress_line
from kvferry.tools.cli.options import write_file

_MODELS = "Llama-3.1-8B,Qwen3-0.6B,Qwen3-Next-80B-A3B"


def layout(
    geometry: Annotated[
        str,
        typer.Option(
            help="Models whose KV cache to move, as `kvferry plan` takes them, separated by commas."
        ),
    ] = _MODELS,
    layouts: Annotated[
        str, typer.Option(help="Orders of the axes in memory, the same on both sides.")
    ] = "LBNHC,LBHNC,BLHNC,BHLNC",
    parallel: Annotated[
        str, typer.Option(help="Tensor-parallel ranks of the producer, and of the reader.")
    ] = "1:1,2:1,1:2,4:2",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the request; by default as many as fill 128 MiB.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=7, help=REPEATS_HELP)] = 9,
    transports: Annotated[str | None, typer.Option(help=TRANSPORTS_HELP)] = None,
    lanes: Annotated[int, typer.Option(min=1, max=16, help="Reading threads.")] = 2,
    link: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Rate in Gbit/s of a link between two network namespaces, over TCP; 0 for no limit. Needs "
            "root. [default: both processes on one host]",
        ),
    ] = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Also per-layer layouts with K and V on pages of their own.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="See that it runs: one model and pair of sizes, 16 MiB.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="SVG file to write with a plot of the table.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: all rounds, in seconds and bytes.")
    ] = False,
) -> None:
    """Compare memory layouts, parallel sizes and strategies.

    A request with scattered blocks moves, over NIXL between two processes, from an engine to one rank of
    another: direct, over-read, staged, and as the planner chooses. Speeds are multiples of raw NIXL's at
    2 MiB in the same round.
    """
    from rich.console import Console

    from benchmarks.layout import report
    from benchmarks.layout.measure import LayoutJob, k_and_v_apart, measure
    from benchmarks.layout.plot import picture
    from kvferry.tools.measuring.rounds import machine_facts
    from kvferry.tools.measuring.simulated import read_geometry

    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot} is not an .svg file, which is the only kind that is written")
    if quick:
        geometry, parallel, tokens = "Qwen3-0.6B", "1:1", 160
    readings = [read_geometry(name) for name in geometry.split(",")]
    job = LayoutJob(
        layouts=parse_layouts(layouts),
        parallel=_parse_parallel(parallel),
        repeats=repeats,
        tokens=tokens,
        transports=transports,
        lanes=lanes,
        gigabits=link,
    )
    with progress_line() as progress:
        tables = [measure(job, reading, progress) for reading in readings]
        if apart:
            per_layer = replace(job, layouts=tuple(one for one in job.layouts if one[0] == "L"))
            tables += [measure(per_layer, k_and_v_apart(reading), progress) for reading in readings]
    if plot is not None:
        write_file(plot, picture(tables))
    if as_json:
        print(json.dumps(report.as_json(tables, machine_facts())))
    else:
        report.show(tables, machine_facts(), repeats, Console(highlight=False))


def _parse_parallel(text: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs in a text such as ``1:1,2:1``: number of ranks of the producer and of the reader.

    Raises:
        ConfigError: a pair is not two positive numbers.
    """
    found = []
    for pair in text.split(","):
        numbers = pair.split(":")
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(f"--parallel {pair} is not two numbers of ranks, like 2:1")
        found.append((int(numbers[0]), int(numbers[1])))
    return tuple(found)
