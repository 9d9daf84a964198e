"""The commands of `python -m benchmarks`."""

from __future__ import annotations

import typer

from benchmarks.accuracy.command import accuracy
from benchmarks.attention.command import attention
from benchmarks.choice.command import choice
from benchmarks.copies.command import copies
from benchmarks.eviction.command import eviction
from benchmarks.fleet.command import fleet
from benchmarks.gpu_check.command import gpu_check
from benchmarks.handover.command import handover
from benchmarks.layout.command import layout
from benchmarks.offload.command import offload
from benchmarks.overhead.command import overhead
from benchmarks.page.command import page
from benchmarks.redeem.command import redeem
from benchmarks.replay.command import replay
from benchmarks.router.command import router
from benchmarks.safety.command import safety
from benchmarks.scale.command import scale
from benchmarks.shared.command import shared
from benchmarks.startup.command import startup
from benchmarks.steps.command import steps
from benchmarks.storage.command import storage
from benchmarks.streaming.command import streaming
from benchmarks.turns.command import turns
from kvferry.tools.cli.main import run
from kvferry.tools.cli.options import check_output
from kvferry.tools.cli.usage import HELP_OPTIONS

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure kvferry's own design: hand-overs, layouts, protections, tiers, policies, turns, growth.",
    no_args_is_help=True,
    add_completion=False,
    callback=check_output,
    context_settings=HELP_OPTIONS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (
    handover,
    startup,
    steps,
    overhead,
    layout,
    attention,
    copies,
    offload,
    storage,
    fleet,
    choice,
    eviction,
    router,
    safety,
    shared,
    redeem,
    turns,
    replay,
    streaming,
    scale,
    gpu_check,
    page,
    accuracy,
):
    app.command(_command.__name__)(_command)

if __name__ == "__main__":
    run(app, "python -m benchmarks")
