"""What keeps NIXL from starting is named, with what to do."""

from __future__ import annotations

import errno
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.transport.agent import missing_requirements


def shm(free_mib: float, flags: int = 0) -> Any:
    return lambda path: SimpleNamespace(f_frsize=1, f_bavail=int(free_mib * 2**20), f_flag=flags)


def gone(path: str) -> Any:
    raise OSError(errno.ENOENT, "gone")


ENOUGH = {resource.RLIMIT_NOFILE: 1024}


@pytest.mark.parametrize(
    ("stat", "limits", "expected"),
    [
        (shm(64), ENOUGH, []),
        (shm(0.5), ENOUGH, ["/dev/shm has 512 KiB free (docker: --shm-size=1g)"]),
        (shm(64, os.ST_RDONLY), {}, ["/dev/shm is mounted read-only (mount a tmpfs there for writing)"]),
        (gone, {}, ["/dev/shm cannot be used: No such file or directory (mount a tmpfs there)"]),
        (shm(64), {resource.RLIMIT_FSIZE: 1000}, ["files may have 1,000 bytes (ulimit -f unlimited)"]),
        (
            shm(0),
            {resource.RLIMIT_NOFILE: 64},
            ["/dev/shm has 0 B free (docker: --shm-size=1g)", "64 files may be open (ulimit -n 65535)"],
        ),
    ],
    ids=["nothing", "full", "read-only", "gone", "files", "two"],
)
def test_each_unmet_requirement_is_named(stat, limits, expected) -> None:
    assert list(missing_requirements(stat, limits)) == expected
