"""The end of processes of other projects."""

from __future__ import annotations

import subprocess


def end(process: subprocess.Popen[bytes], patience_seconds: float = 30.0) -> None:
    """Ask a process to end, and kill it if it has not ended by then.

    vLLM 0.32's API server may never end: its shutdown fails if a process that it kills ends at that moment.
    """
    process.terminate()
    try:
        process.wait(patience_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
