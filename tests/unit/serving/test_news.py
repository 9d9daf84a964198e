"""News of engines is no condition of serving."""

from __future__ import annotations

import errno
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.serving.engine import EngineState
from kvferry.serving.progress import startup_progress
from kvferry.serving.serve import _say


class Starting:
    """What is shown of an engine."""

    class spec:  # noqa: N801
        name = "prefill-0"

    state = EngineState.STARTING
    log_path = Path("/log")


class Full(StringIO):
    """Standard error of a service whose disk is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_news_that_cannot_be_written_end_nothing():
    console = Console(file=Full())
    with pytest.raises(OSError, match="No space"):
        console.print("as it is")
    _say(console, "an engine has ended")
    with startup_progress(console) as show:
        show([Starting()])
