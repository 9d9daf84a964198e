"""Movers that run fio: one job per file in flight, which writes new files or reads existing ones.

Each job has several pieces of its file in flight. fio reports its own time, so its start is not timed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.errors import TransferError

_PIECE_BYTES = 1 << 20
_PIECES = 8
_PATIENCE_SECONDS = 300.0


class FioWrites:
    """A mover that writes new files, and flushes each when it is complete."""

    name = "fio"

    def __init__(self, folder: Path, depth: int, files: int, size: int) -> None:
        """Prepare a mover.

        Args:
            folder: folder with room for the files.
            depth: number of jobs.
            files: number of files.
            size: bytes of each file, a multiple of the page size.
        """
        self._folder, self._depth, self._files, self._size = folder, depth, files, size
        self.bytes = files * size

    def move(self) -> float:
        """Write all files; return the seconds."""
        with TemporaryDirectory(dir=self._folder) as folder:
            names = [str(number) for number in range(self._files)]
            return _run(Path(folder), "write", names, self._size, self._depth)


class FioReads:
    """A mover that reads files of one folder and one size."""

    name = "fio"

    def __init__(self, depth: int, files: Sequence[Path]) -> None:
        self._folder, self._names, self._depth = files[0].parent, [file.name for file in files], depth
        self._size = files[0].stat().st_size
        self.bytes = len(files) * self._size

    def move(self) -> float:
        """Read all files; return the seconds."""
        return _run(self._folder, "read", self._names, self._size, self._depth)


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def _run(folder: Path, direction: str, names: Sequence[str], size: int, depth: int) -> float:
    """Run fio; return the seconds.

    Raises:
        TransferError: fio failed.
    """
    command = ["fio", "--output-format=json", *(["--readonly"] if direction == "read" else []), "-"]
    done = subprocess.run(
        command,
        input=_job_file(direction, names, size, depth),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise TransferError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    # From the bandwidth: fio leaves out the end of a file that fills no whole piece.
    return size * len(names) / float(job[direction]["bw_bytes"])


def _job_file(direction: str, names: Sequence[str], size: int, depth: int) -> str:
    settings = {
        "rw": direction,
        "direct": 1,
        "ioengine": "libaio",
        "bs": min(size, _PIECE_BYTES),
        "iodepth": _PIECES,
        "filesize": size,
        "thread": 1,
        "group_reporting": 1,
        "file_service_type": "sequential",
        "openfiles": 1,
        "fallocate": "none",
    }
    if direction == "write":
        settings |= {"create_on_open": 1, "fsync_on_close": 1, "refill_buffers": 1}
    lines = ["[global]", *(f"{name}={value}" for name, value in settings.items())]
    for number in range(depth):
        if share := names[number::depth]:
            lines += [f"[job{number}]", f"size={size * len(share)}", f"filename={':'.join(share)}"]
    return "\n".join(lines)
