"""The `kvferry` command."""

from __future__ import annotations

import sys

import typer

from kvferry.cli import bench, cache, config, demo, plan, router, serve
from kvferry.errors import ConfigError, KVFerryError

_FAILED = 1
_USAGE = 2

app = typer.Typer(
    name="kvferry",
    help="Moves the KV cache of hybrid language models between engines.",
    no_args_is_help=True,
    add_completion=False,
    # Errors of usage as plain sentences, like ours.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _module in (serve, router, config, demo, plan, cache, bench):
    _module.register(app)


def main() -> None:
    """Run a command; what kvferry raises becomes one sentence and an exit code."""
    try:
        app()
    except ConfigError as error:
        _end(error, _USAGE)
    except KVFerryError as error:
        _end(error, _FAILED)


def _end(error: KVFerryError, code: int) -> None:
    print(f"kvferry: {error}", file=sys.stderr)
    sys.exit(code)
