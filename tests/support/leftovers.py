"""Everything that a command starts, found by a mark in the environment that its processes inherit."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

_VARIABLE = "KVFERRY_TEST_RUN"
_SHARED_MEMORY = re.compile(rb"/dev/shm/(\S+)")


class Leftovers:
    """Which processes and shared memory of one run there are.

    Attributes:
        environment: to start the run with.
    """

    def __init__(self) -> None:
        mark = uuid.uuid4().hex
        self.environment = {_VARIABLE: mark}
        self._entry = f"{_VARIABLE}={mark}".encode()

    def processes(self) -> dict[int, str]:
        """Command lines of the processes that run now, by their ids."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            if self._entry in _read(folder / "environ"):
                found[int(folder.name)] = _read(folder / "cmdline").replace(b"\0", b" ").decode()
        return found

    def shared_memory(self) -> set[str]:
        """Names under /dev/shm that these processes have mapped now."""
        maps = (_read(Path(f"/proc/{pid}/maps")) for pid in self.processes())
        return {name.decode() for text in maps for name in _SHARED_MEMORY.findall(text)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
