"""Run commands of `kvferry` as on a computer without engines: `python light_computer.py Windows|Linux`.

Each line of standard input is a command line, as JSON: a list of arguments and a folder. Each line of
standard output is what a fork of this process made of it: [exit code, standard output, standard error].
On either system, imports of what the core installation lacks fail. Linux is otherwise as it is. On Windows,
imports of what Windows lacks fail too, and so do system calls that Windows lacks.
Libraries that have code of their own for Windows are imported before that, with their code for Linux.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import ctypes
import json
import multiprocessing  # noqa: F401
import os
import platform
import select
import shutil  # noqa: F401
import signal
import subprocess  # noqa: F401
import sys
import tempfile
import traceback

import anyio  # noqa: F401
import filelock  # noqa: F401
import numpy as np  # noqa: F401
import obstore  # noqa: F401
import psutil  # noqa: F401
import zmq  # noqa: F401

NOT_INSTALLED = {
    "aiohttp",
    "httptools",
    "matplotlib",
    "nixl",
    "starlette",
    "torch",
    "transformers",
    "uvicorn",
    "uvloop",
    "vllm",
}
NOT_ON_WINDOWS = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}
MISSING = {
    os: (
        "O_CLOEXEC O_DIRECT O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK fdatasync fork getegid geteuid getgid "
        "getgroups getpgid getuid killpg memfd_create pidfd_open posix_fallocate pread preadv pwrite pwritev "
        "sched_getaffinity setsid statvfs uname"
    ),
    select: "epoll poll",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL",
}


class _Refusal:
    """A finder that refuses modules."""

    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _Library(ctypes.CDLL):
    """A shared library. The program itself is none on Windows."""

    def __init__(self, name, *args, **options):
        if name is None:
            raise TypeError("a library has a name")
        super().__init__(name, *args, **options)


def leave_the_core_only() -> None:
    """Take from this process what the core installation lacks."""
    sys.meta_path.insert(0, _Refusal(NOT_INSTALLED))


def become_windows() -> None:
    """Take from this process what Windows lacks."""
    for each in NOT_ON_WINDOWS & set(sys.modules):
        del sys.modules[each]
    sys.meta_path.insert(0, _Refusal(NOT_ON_WINDOWS))
    for module, attributes in MISSING.items():
        for attribute in attributes.split():
            delattr(module, attribute)
    ctypes.CDLL = _Library
    platform.system = lambda: "Windows"


def run_in_fork(fork, arguments, folder):
    """Run `kvferry` with these arguments in a folder, and return its exit code, output and errors."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (child := fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            sys.argv = ["kvferry", *arguments]
            os._exit(exit_code())
        _, status = os.waitpid(child, 0)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
    return os.waitstatus_to_exitcode(status), *said


def exit_code():
    """Run `kvferry` and return its exit code."""
    from kvferry.tools.cli.entry import main

    try:
        main()
    except SystemExit as end:
        return end.code or 0
    except BaseException:  # noqa: BLE001 - shown as an interpreter shows it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve():
    """Run the command lines of standard input."""
    fork = os.fork
    leave_the_core_only()
    if sys.argv[1] == "Windows":
        become_windows()
    import kvferry.tools.cli.main  # noqa: F401 - once for all forks

    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_in_fork(fork, *json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
