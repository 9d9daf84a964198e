"""`python -m benchmarks safety`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvferry.tools.cli.bench import parse_names, progress_line
from kvferry.tools.cli.options import without_none


def safety(
    parts: Annotated[
        str,
        typer.Option(help="Parts to measure, separated by commas: lease, verify, checksum, encrypt, curve."),
    ] = "lease,verify,checksum,encrypt,curve",
    geometry: Annotated[
        str, typer.Option(help="Model whose KV cache to move, as `kvferry plan` takes it.")
    ] = "Llama-3.1-8B",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers, instead of the model's.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the request that is moved.")] = 4096,
    repeats: Annotated[int, typer.Option(min=7, help="Rounds; each with and without.")] = 15,
    link: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="verify: rate in Gbit/s of a link between two network namespaces, over TCP; 0 for no limit. "
            "Needs root.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: all rounds, in seconds.")] = False,
) -> None:
    """Measure what protections cost, on and off in one run.

    lease: a transfer between two processes, with the check that the producer still has the blocks, and
    without. verify: transfers between engines that are alike and that are not, verified (verify_transfers)
    and not, in seconds and in processor time of both sides. checksum: a prompt loaded from files in memory
    into an engine's blocks. encrypt: the same, from files that are encrypted and from others. curve: what
    channels between engines say over ZeroMQ, encrypted and plain, and its share of a transfer.
    """
    from rich.console import Console

    from benchmarks.safety import report
    from benchmarks.safety.cost import SafetyJob
    from benchmarks.safety.measure import PARTS, measure
    from kvferry.tools.measuring.simulated import read_geometry

    chosen = parse_names(parts, PARTS, "parts")
    reading = read_geometry(geometry, without_none(num_hidden_layers=layers))
    with progress_line() as progress:
        job = SafetyJob(parts=chosen, reading=reading, tokens=tokens, repeats=repeats, gigabits=link)
        measured = measure(job, progress)
    if as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
