"""`kvferry explain`, and the events that it has of a request."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from support.in_process import kvferry


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these arguments. Every line of what it prints fits a terminal."""
    done = kvferry("explain", *arguments)
    if "--json" not in arguments:
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done


def events(request_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of the only request of that name."""
    done = explain(request_id, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return [(name, event) for name, event in found["events"]]
