"""Parse or run a command line of `kvferry` in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer

from kvferry.cli.main import app, main


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


class FinishedCommand(NamedTuple):
    """How a command ended.

    Attributes:
        returncode: exit code.
        stdout, stderr: text that it printed.
    """

    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: str) -> FinishedCommand:
    """Run `kvferry` with these arguments in this process, without a terminal.

    Output of other threads and of C libraries is not captured.
    """
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["kvferry", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        return FinishedCommand(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("the command did not exit")


def run_command_in_terminal(*arguments: str) -> None:
    """Run `kvferry` with these arguments, and exit, in a process that owns its standard streams."""
    sys.argv = ["kvferry", *arguments]
    main()
