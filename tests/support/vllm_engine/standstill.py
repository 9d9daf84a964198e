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
    """Hold up posts of READs to peers, and reads of chunk files, where a test wants it."""
    from kvferry.tiers.files import chunk_file
    from kvferry.transport.agent import Agent

    folder = Path(os.environ[FOLDER])
    post, read = Agent.post, chunk_file.read_all

    def held_post(self: Agent, handle: Any) -> Any:
        _wait_for(folder / PEERS)
        return post(self, handle)

    def held_read(*args: Any) -> int:
        _wait_for(folder / FILES)
        return read(*args)

    Agent.post, chunk_file.read_all = held_post, held_read


def _wait_for(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)
