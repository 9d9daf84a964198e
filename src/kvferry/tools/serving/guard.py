"""A small parent process of an engine, the guard, which ends the engine when the launcher has ended.

An engine is a tree of processes, and killing its root leaves the others running. The guard adopts orphans of
the tree (as a "child subreaper"), so it can find every process that is left. It ends the tree in these cases:

- STOP arrives on the lifeline, a pipe from the launcher, or the lifeline closes: the guard sends SIGTERM to
  the root, and kills the tree after the grace period.
- KILL arrives on the lifeline, also during the grace period: the guard kills all processes at once.
- The root ends by itself: the guard ends the other processes.

The guard kills Python's resource trackers last, because they remove the shared memory of killed processes.
They ignore SIGTERM.

    python -m kvferry.tools.serving.guard LIFELINE_FD GRACE_SECONDS COMMAND...

The guard exits with the root's code, or 128 + n if signal n ended the root. It imports few modules, so that
it starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvferry.common.machine import die_with_parent

STOP = b"s"
KILL = b"k"

# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36
_POLITE_SECONDS = 1.0
# Resource trackers end by themselves when those that they serve are gone, and remove their shared memory.
_TRACKER_SECONDS = 3.0
_POLL_SECONDS = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run an engine's command until it or the launcher ends, end all its processes, and return its code."""
    lifeline, stop_timeout_seconds, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    root = subprocess.Popen(command, preexec_fn=die_with_parent)  # noqa: PLW1509 - no threads here
    # The engine must not inherit ignored signals. So install handlers, and only after it has started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: root.send_signal(signal.SIGTERM))
    _watch(root, lifeline, stop_timeout_seconds)
    _end_tree(polite=root.poll() is not None)
    code = root.wait()
    return 128 - code if code < 0 else code


def _watch(root: subprocess.Popen[bytes], lifeline: int, stop_timeout_seconds: float) -> None:
    """Wait until the engine's main process has ended, or the caller must kill all processes of the engine.

    At STOP, or if the pipe from the launcher closes, send SIGTERM to the main process, and wait for its end,
    KILL or the timeout. At KILL, return at once, so that the caller kills without SIGTERM.
    """
    ended = os.pidfd_open(root.pid)
    watched = select.poll()  # select.select refuses descriptors from 1024, and a busy launcher has them
    for descriptor in (ended, lifeline):
        watched.register(descriptor, select.POLLIN)
    deadline: float | None = None
    while True:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [number for number, _ in watched.poll(None if seconds is None else seconds * 1000)]
        if not ready or ended in ready:
            return
        request = os.read(lifeline, 1)
        if request == KILL:
            return
        if not request:
            watched.unregister(lifeline)
        if deadline is None:
            root.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + stop_timeout_seconds


def _end_tree(*, polite: bool) -> None:
    if polite:
        _signal_all(_descendants(trackers=False), signal.SIGTERM)
        _wait_gone(_POLITE_SECONDS, trackers=False)
    _signal_all(_descendants(trackers=False), signal.SIGKILL)
    _wait_gone(_TRACKER_SECONDS, trackers=True)
    _signal_all(_descendants(trackers=True), signal.SIGKILL)
    _wait_gone(_POLITE_SECONDS, trackers=True)


def _wait_gone(seconds: float, *, trackers: bool) -> None:
    deadline = time.monotonic() + seconds
    while _descendants(trackers=trackers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(*, trackers: bool) -> list[int]:
    """Return the ids of all running descendants of this process, with or without resource trackers."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _read(entry / "stat")):
            # The process name in parentheses may contain any character. State and parent follow the last ")".
            state, parent = stat.rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(entry.name)] = int(parent)
    below = {os.getpid()}
    size = 0
    while size != len(below):
        size = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    below.discard(os.getpid())
    tracker = b"multiprocessing.resource_tracker"
    return sorted(pid for pid in below if trackers or tracker not in _read(Path(f"/proc/{pid}/cmdline")))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
