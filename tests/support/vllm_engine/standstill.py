"""Reads that stand still for as long as a file exists, in every process of an engine that has this plugin."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FOLDER = "KVFERRY_TEST_HELD"
"""Environment variable: the folder in which a file named PEERS or FILES holds up reads of that kind."""

PEERS, FILES = "peers", "files"


def declare() -> None:
    """Keep READs from peers in flight, and hold up reads of chunk files, where a test wants it.

    UCX starts a READ without waiting for the peer, so a READ that stalls is one that does not end.
    """
    from kvferry.tiers.files import chunk_file
    from kvferry.transport.agent import Agent, ReadState

    folder = Path(os.environ[FOLDER])
    state, read = Agent.state, chunk_file.read_all

    def held_state(self: Agent, handle: Any) -> Any:
        return ReadState.IN_FLIGHT if (folder / PEERS).exists() else state(self, handle)

    def held_read(*args: Any, **options: Any) -> int:
        _wait_for(folder / FILES)
        return read(*args, **options)

    Agent.state, chunk_file.read_all = held_state, held_read


def _wait_for(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)
