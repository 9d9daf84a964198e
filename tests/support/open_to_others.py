"""Files, folders, sockets and shared memory that processes have, and that other users could use."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_OTHERS = 0o077
_LISTENS = "00010000"
"""Flags of a socket in /proc/net/unix to which processes may connect."""
_MAPPED = re.compile(r" (/(?:dev/shm|tmp)/.*)$", re.MULTILINE)


def session(leader: int) -> list[int]:
    """Processes of a session, that of its leader among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # Behind the name, which may have anything in it: state, parent, group, session.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(folder.name))
    return found


def held(pids: Iterable[int]) -> set[str]:
    """Paths of what processes have open, mapped or bound; names of abstract sockets, which begin with "@"."""
    found, sockets = set[str](), set[str]()
    for pid in pids:
        with suppress(OSError):
            found |= set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = str(fd.readlink())
                (sockets if name.startswith("socket:[") else found).add(name)
    for line in Path("/proc/net/unix").read_text().splitlines():
        *fields, path = line.split(maxsplit=7)
        if len(fields) == 7 and f"socket:[{fields[6]}]" in sockets and fields[3] == _LISTENS:
            found.add(path)
    return {name for name in found if not name.endswith(" (deleted)")}


def open_to_others(paths: Iterable[str | Path]) -> dict[str, str]:
    """Modes of what other users may use, each folder above it being open to them as well."""
    found = {}
    for path in map(str, paths):
        if path.startswith("@"):
            found[path] = "any process may connect"
            continue
        with suppress(FileNotFoundError):
            ways = [path, *map(str, Path(path).parents)]
            if all(_open(way) for way in ways):
                found[path] = f"{stat.S_IMODE(Path(path).stat().st_mode):o}"
    return found


def _open(path: str) -> bool:
    return bool(Path(path).stat().st_mode & _OTHERS)
