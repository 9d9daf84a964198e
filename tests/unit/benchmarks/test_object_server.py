"""The S3 server of a benchmark is there while it is wanted, and gone with whoever wanted it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import wait_for

START = """
import sys, time
from pathlib import Path
from benchmarks.object_server import object_server
with object_server(Path(sys.argv[1])) as server:
    print(server.port, flush=True)
    time.sleep(60)
"""


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_object_server_ends_with_the_process_that_started_it(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert listens(port)
        process.send_signal(number)
        process.wait(30)
    wait_for(lambda: not listens(port))
