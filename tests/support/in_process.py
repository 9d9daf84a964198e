"""`kvferry` commands in this process: an interpreter takes longer to start than most of them to run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from kvferry.cli.main import main


def kvferry(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts nothing, as in a terminal of 80 columns, and return how it ended."""
    printed, errors = io.StringIO(), io.StringIO()
    code: object = 0
    argv = ["kvferry", *arguments]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, {"COLUMNS": "80"}),
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(argv, code, printed.getvalue(), errors.getvalue())
