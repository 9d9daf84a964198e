"""Parse a command line of `kvferry` without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from kvferry.cli.main import app


def parse_command_line(arguments: Sequence[str]) -> None:
    """Parse and convert the arguments as `kvferry` does.

    Args:
        arguments: what stands after ``kvferry``.

    Raises:
        Exception: kvferry refuses the arguments; its ``message`` says why. Or an option such as ``--help``
            ends the command.
    """
    command: Any = typer.main.get_command(app)
    context, name, rest = None, "kvferry", list(arguments)
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
