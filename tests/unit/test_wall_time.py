"""No decision of an engine depends on the time of day, except by the ages of files.

Leases, tickets, deadlines, caches of names and rates go by a monotonic clock, and messages between machines
carry durations. So setting the clock, by hours or by NTP, ends no lease and keeps none.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parent
WALL = {
    ("time", "time"), ("time", "time_ns"), ("time", "ctime"), ("time", "localtime"), ("time", "gmtime"),
    ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
}  # fmt: skip
USES = {
    "cache/weights.py": "whether a file may have changed within the last seconds, so is digested again",
    "tools/cli/cache.py": "ages of chunks, for people",
    "tools/cli/explain.py": "ages of requests, for people",
    "tools/doctor/reads.py": "the date in a file of measurements",
    "tools/doctor/costs.py": "the age of a file of measurements, for people",
    "engines/vllm/compat/process.py": "spans, which are in wall time",
    "tools/explain/timeline.py": "times of requests, for people",
    "observe/recorder.py": "arrivals in a recorded trace, for people and to join traces of several engines",
    "observe/trace_server.py": "ages of requests, for people",
    "observe/socket_directory.py": "the age of what a killed process has left",
    "tiers/files/admin.py": "the budget of writes, which engines keep in wall time",
    "tiers/files/tier.py": "times of files, see tests/unit/tiers/files/test_clocks.py",
    "tiers/files/directory_index.py": "times of files, see tests/unit/tiers/files/test_clocks.py",
    "tiers/files/space.py": "times of files, see tests/unit/tiers/files/test_clocks.py",
    "tools/top/poller.py": "times of figures, for people",
    "tools/top/lines.py": "times of figures, for people",
}


SPELLED = re.compile("|".join(rf"\b{module}\.{name}\b|from {module} import" for module, name in sorted(WALL)))
"""Matches all code that reads a wall clock, and some comments. It spares parsing the rest."""


def reads_wall_clock(source: str) -> bool:
    """Whether code names a function that reads the wall clock, or imports one by itself."""
    if not SPELLED.search(source):
        return False
    for node in ast.walk(ast.parse(source)):
        named: set[tuple[str | None, str]] = set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = {(node.value.id, node.attr)}
        elif isinstance(node, ast.ImportFrom):
            named = {(node.module, one.name) for one in node.names}
        if named & WALL:
            return True
    return False


def test_only_ages_of_files_and_texts_for_people_read_the_wall_clock() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if reads_wall_clock(path.read_text("utf-8"))
    }
    entries = "".join(f'    "{path}": "WHY",\n' for path in sorted(readers - USES.keys()))
    assert not entries, f"call time.monotonic, or add this to USES in {Path(__file__).name}:\n{entries}"
    assert not USES.keys() - readers, f"remove these files from USES in {Path(__file__).name}"


def test_every_spelling_of_a_wall_clock_is_recognised() -> None:
    assert reads_wall_clock("import time\nuntil = time.time() + 3")
    assert reads_wall_clock("clock = time.time_ns")
    assert reads_wall_clock("from time import time as now")
    assert reads_wall_clock("from datetime import datetime\ndatetime.now()")
    assert not reads_wall_clock("import time\ntime.monotonic()")
