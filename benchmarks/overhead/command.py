"""`python -m benchmarks overhead`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvferry.tools.cli.bench import TRANSPORTS_HELP, MovedModel, progress_line
from kvferry.tools.cli.options import command, flag, option


@dataclass(frozen=True)
class OverheadOptions(MovedModel):
    """The options of `python -m benchmarks overhead`."""

    tokens: int = option(131_072, None, "Tokens of the request that is planned.", min=1)
    moved: int = option(4096, None, "Tokens that are under way while hooks run.", min=1)
    repeats: int = option(9, None, "Rounds of planning and of getting ready.", min=7)
    transports: str | None = option(None, None, TRANSPORTS_HELP)
    as_json: bool = flag("--json", "Print JSON: all figures, in seconds.")


@command
def overhead(options: OverheadOptions) -> None:
    """Measure what a request costs the decode side besides moving bytes.

    Planning a long request, getting ready for a peer with other block sizes, and the time inside an engine's
    hooks on every step while transfers run between two processes.
    """
    from rich.console import Console

    from benchmarks.overhead import report
    from benchmarks.overhead.measure import OverheadJob, measure
    from kvferry.tools.plan.side import EngineSide

    job = OverheadJob(
        reading=options.read(),
        side=EngineSide(block_tokens=options.block_size),
        planned_tokens=options.tokens,
        moved_tokens=options.moved,
        repeats=options.repeats,
        transports=options.transports,
    )
    with progress_line() as progress:
        measured = measure(job, progress)
    if options.as_json:
        print(json.dumps(report.as_json(measured)))
    else:
        report.show(measured, Console(highlight=False))
