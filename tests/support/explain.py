"""`kvferry explain`, and the events that it has of a request."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any
from unittest import mock

from support.command_line import run_kvferry


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments, as in a terminal of 80 columns."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80"}):
        done = run_kvferry("explain", *arguments)
    if "--json" not in arguments:
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done


def events(request_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of the only request of that name."""
    done = explain(request_id, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return [(name, event) for name, event in found["events"]]
