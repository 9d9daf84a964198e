"""`kvferry explain` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_COMMAND = [sys.executable, "-c", "from kvferry.cli.main import main; main()", "explain"]


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with these arguments; every line of what it prints fits a terminal."""
    done = subprocess.run([*_COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    if "--json" not in arguments:
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done


def events(request_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Of the one request of that name."""
    done = explain(request_id, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return [(name, event) for name, event in found["events"]]
