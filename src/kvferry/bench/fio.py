"""fio as a mover: files of one size, written anew or read, by as many jobs as files are under way.

Each job has several pieces of its file under way. fio says itself how long it took: what it needs to start
is on nobody's clock.
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
    """New files, each flushed when it is whole; a `Mover`."""

    name = "fio"

    def __init__(self, folder: Path, depth: int, files: int, size: int) -> None:
        """Prepare.

        Args:
            folder: which has room.
            depth: jobs.
            files: how many.
            size: bytes of each, whole pages.
        """
        self._folder, self._depth, self._files, self._size = folder, depth, files, size
        self.bytes = files * size

    def move(self) -> float:
        """Write once."""
        with TemporaryDirectory(dir=self._folder) as folder:
            names = [str(number) for number in range(self._files)]
            return _run(Path(folder), "write", names, self._size, self._depth)


class FioReads:
    """Files of one folder and size; a `Mover`."""

    name = "fio"

    def __init__(self, depth: int, files: Sequence[Path]) -> None:
        self._folder, self._names, self._depth = files[0].parent, [file.name for file in files], depth
        self._size = files[0].stat().st_size
        self.bytes = len(files) * self._size

    def move(self) -> float:
        """Read once."""
        return _run(self._folder, "read", self._names, self._size, self._depth)


def has_fio() -> bool:
    """Whether fio can be run."""
    return shutil.which("fio") is not None


def _run(folder: Path, way: str, names: Sequence[str], size: int, depth: int) -> float:
    """Seconds.

    Raises:
        TransferError: fio failed.
    """
    command = ["fio", "--output-format=json", *(["--readonly"] if way == "read" else []), "-"]
    done = subprocess.run(
        command,
        input=_job_file(way, names, size, depth),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise TransferError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    # What is left of a file when its last whole piece is through, fio leaves out.
    return size * len(names) / float(job[way]["bw_bytes"])


def _job_file(way: str, names: Sequence[str], size: int, depth: int) -> str:
    settings = {
        "rw": way,
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
    if way == "write":
        settings |= {"create_on_open": 1, "fsync_on_close": 1, "refill_buffers": 1}
    lines = ["[global]", *(f"{name}={value}" for name, value in settings.items())]
    for number in range(depth):
        if share := names[number::depth]:
            lines += [f"[job{number}]", f"size={size * len(share)}", f"filename={':'.join(share)}"]
    return "\n".join(lines)
