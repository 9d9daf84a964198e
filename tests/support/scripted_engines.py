"""Scripts in the place of engines: real processes that answer `/health`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from kvferry.tools.serving.engine import EngineSpec

# A tree of processes like an engine's: a child that ignores SIGTERM, and a server in the root.
ENGINE = """
import http.server, json, os, signal, subprocess, sys
name, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
with open(f"{folder}/{name}.pids", "w") as file:
    json.dump([os.getpid(), child.pid], file)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Script(EngineSpec):
    """A Python script in the place of vLLM."""

    code: str = ENGINE
    folder: str = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code, self.name, str(self.port), self.folder]


def pids_of(folder: Path, name: str) -> list[int]:
    return json.loads((folder / f"{name}.pids").read_text())


def alive(pid: int) -> bool:
    """Whether a process runs; a process that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
