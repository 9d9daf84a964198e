"""Run a command of `kvferry` in this process, or only parse its command line."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from typing import Any, TextIO
from unittest.mock import patch

import typer

from kvferry.tools.cli.main import app, main

KVFERRY = (sys.executable, "-c", "from kvferry.tools.cli.entry import main; main()")
"""Command of a process of its own."""


def run_kvferry(*arguments: str, stdout: TextIO | None = None) -> subprocess.CompletedProcess[str]:
    """Run `kvferry` with these arguments, and return its exit code and its output.

    Args:
        arguments: what stands after ``kvferry``.
        stdout: file for standard output; None to return the output.
    """
    output, errors = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["kvferry", *arguments]),
        redirect_stdout(stdout or output),
        redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def parse_command_line(arguments: Sequence[str]) -> None:
    """Parse and convert the arguments as `kvferry` does.

    Args:
        arguments: what stands after ``kvferry``.

    Raises:
        Exception: kvferry refuses the arguments; its ``message`` says why. Or an option such as ``--help``
            ends the command.
    """
    command: Any = _command()
    context, name, rest = None, "kvferry", list(arguments)
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


def run_command_in_terminal(*arguments: str) -> None:
    """Run `kvferry` with these arguments, and exit, in a process that owns its standard streams."""
    sys.argv = ["kvferry", *arguments]
    main()
