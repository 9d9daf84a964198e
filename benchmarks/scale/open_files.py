"""Raise the limit of open files for a benchmark with many sockets."""

from __future__ import annotations

import resource

from kvferry.common.errors import ConfigError


def allow_open_files(count: int, limits: tuple[int, int] | None = None) -> None:
    """Raise this process's soft limit of open files to `count`, if it is lower.

    Args:
        count: number of files.
        limits: soft and hard limit; None to ask the kernel.

    Raises:
        ConfigError: the hard limit is lower.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(
            f"this process may open {hard} files, and the case peers needs {count}; raise the hard limit "
            "(ulimit -Hn), or leave the case out with --cases"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
