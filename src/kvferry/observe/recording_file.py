"""Find and open the file of a recording: a header, then a line for each request.

An engine that starts again goes on with its file if its header is the same. It repeats the header, because
its caches are empty from there on. A file with another header, and a file that another engine writes at
present, are left alone: the recording then goes to the same name with a number, ``trace-2.jsonl`` for
``trace.jsonl``. The data-parallel engine 1 takes ``trace-dp1.jsonl``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.operating_system import fcntl
from kvferry.private_file import open_private

MOST_FILES = 100
"""Largest number of files with one name that recordings go to."""
_LONGEST_HEADER = 1 << 20
_PIECE_BYTES = 1 << 16


def open_recording(path: str, header: Mapping[str, Any], engine_index: int = 0) -> tuple[str, FileIO]:
    """Open the file of a recording for appending, without a buffer, and write the header.

    No other engine opens the file as long as this process has it open.

    Args:
        path: path that the setting names.
        header: header of the recording, made of JSON types.
        engine_index: data-parallel index of the engine.

    Returns:
        Path of the file, and the file.

    Raises:
        ConfigError: each of `MOST_FILES` names has a file with another header, or is in use.
        OSError: the file cannot be opened or written, or cannot be locked.
        ValueError: no file can have this path.
    """
    line = json.dumps(header).encode() + b"\n"
    for candidate in _candidates(path, engine_index):
        file = open(candidate, "a+b", buffering=0, opener=open_private)  # noqa: SIM115 - the caller closes it
        try:
            # The lock comes first: another engine may be writing its header.
            if _lock(file) and _goes_on(file, line):
                file.write(line)
                return candidate, file
        except BaseException:
            file.close()
            raise
        file.close()
    raise ConfigError(
        f"{MOST_FILES} files beside {path} are recordings with other headers, or in use; name another file"
    )


def _candidates(path: str, engine_index: int) -> Iterator[str]:
    whole = Path(path)
    stem = whole.stem + (f"-dp{engine_index}" if engine_index else "")
    for number in range(1, MOST_FILES + 1):
        yield str(whole.with_name(f"{stem}{f'-{number}' if number > 1 else ''}{whole.suffix}"))


def _lock(file: FileIO) -> bool:
    """Lock a file until it is closed. Return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _goes_on(file: FileIO, header: bytes) -> bool:
    """Return True if a locked file is empty or begins with this header. Removes half a last line from it."""
    if not os.fstat(file.fileno()).st_size:
        return True
    file.seek(0)
    if file.read(_LONGEST_HEADER).partition(b"\n")[:2] != (header[:-1], b"\n"):
        return False
    _remove_incomplete_line(file)
    return True


def _remove_incomplete_line(file: FileIO) -> None:
    """Cut off what follows the last line feed of a file. The file has at least one."""
    # An engine may have been killed while it wrote. Read from the end, because recordings are large.
    whole = end = file.seek(0, os.SEEK_END)
    while True:
        begin = max(0, end - _PIECE_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            break
        end = begin
    if begin + found + 1 < whole:
        file.truncate(begin + found + 1)
