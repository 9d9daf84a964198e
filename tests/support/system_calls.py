"""A forked process whose n-th system call on files fails, is cut short, hangs, or is its last.

The test traces the process (ptrace), so the fault is the kernel's answer to whatever code makes the call: no
function is replaced. Calls are counted while it is in `counted`, over all threads.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_TRACEME, _POKEUSER, _SYSCALL, _SETOPTIONS, _INFO = 0, 6, 24, 0x4200, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x100000  # system calls are told apart, threads are traced, and end with the tracer
_ENTRY = 1
_MARK = 110  # getppid
_OPEN_AT = 257
_ALL_THREADS = 0x40000000
# Of the x86-64 registers as the kernel stores them for a tracer.
_RAX, _NUMBER, _ARGUMENTS = 80, 120, (112, 104, 96, 56, 72, 64)
_NO_CALL = (1 << 64) - 1

CALLS = {
    0: "read",
    1: "write",
    2: "open",
    3: "close",
    4: "stat",
    5: "fstat",
    6: "lstat",
    8: "lseek",
    17: "pread",
    18: "pwrite",
    19: "readv",
    20: "writev",
    21: "access",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    76: "truncate",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    87: "unlink",
    90: "chmod",
    91: "fchmod",
    137: "statfs",
    138: "fstatfs",
    217: "getdents",
    257: "open",
    258: "mkdir",
    262: "stat",
    263: "unlink",
    264: "rename",
    280: "utime",
    285: "fallocate",
    295: "pread",
    296: "pwrite",
    316: "rename",
    327: "pread",
    328: "pwrite",
    332: "stat",
}
"""Calls on files, by number."""
WRITING = {"write", "create", "pwrite", "mkdir", "rename", "utime", "fdatasync", "fsync"}
"""What may find that there is no space."""
CHANGING = {*WRITING, "unlink", "rmdir", "truncate", "ftruncate"}
"""What leaves a disk other than it was."""
_MOVING = {17: 2, 18: 2, 295: 2, 296: 2, 327: 2, 328: 2}
"""Calls that move bytes, with the argument that says how many, or how many pieces."""


class How(Enum):
    """What becomes of a call."""

    REFUSED = "not done, and reported as an error"
    REPORTED = "done, and reported as an error"
    SHORT = "done in part"
    KILLED = "the process is killed before it"
    TORN = "done in part, then the process is killed"
    HELD = "never returns, nor does any after it, but of the first thread"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which call.

    Attributes:
        at: number of the call, from 1 on; 0 for none.
        how: what becomes of it.
        error: its number, where one is reported.
    """

    at: int = 0
    how: How = How.REFUSED
    error: int = errno.EIO

    def __str__(self) -> str:
        reported = self.how in (How.REFUSED, How.REPORTED)
        return f"{self.at} {self.how.name}{f' {errno.errorcode[self.error]}' if reported else ''}"


@dataclass
class Traced:
    """How a process went.

    Attributes:
        calls: names of the calls on files that were made, in order.
        said: what it returned; None if it was killed.
        killed: whether it was.
    """

    calls: list[str] = field(default_factory=list)
    said: Any = None
    killed: bool = False


def possible() -> bool:
    """Whether processes can be traced here."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    try:
        return run(lambda: 1).said == 1
    except OSError:
        return False


@contextmanager
def counted() -> Iterator[None]:
    """The calls that are counted, in the process that `run` makes."""
    os.getppid()
    try:
        yield
    finally:
        os.getppid()


def run(work: Callable[[], Any], fault: Fault = Fault()) -> Traced:
    """Fork, and work there.

    Args:
        work: what it does, some of it within `counted`; what this returns is sent here, as JSON.
        fault: what happens to one of the calls that are counted.

    Raises:
        AssertionError: an exception left `work`; with its text.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _work(work, writing)
    os.close(writing)
    made = Traced()
    try:
        made.killed = _trace(pid, fault, made.calls)
        with os.fdopen(reading) as said:
            text = said.read()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    if made.killed and fault.how in (How.KILLED, How.TORN):
        return made
    good, made.said = json.loads(text) if text else (False, "it ended without a word")
    assert good, f"{fault} of {made.calls}:\n{made.said}"
    return made


def _work(work: Callable[[], Any], writing: int) -> None:
    try:
        _ptrace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        said = (True, work())
    except BaseException:  # noqa: BLE001 - told to the test
        said = (False, traceback.format_exc())
    os.write(writing, json.dumps(said).encode())
    os._exit(0)


def _trace(pid: int, fault: Fault, calls: list[str]) -> bool:
    """Follow a process to its end; whether it was killed."""
    os.waitpid(pid, _ALL_THREADS)
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)
    _ptrace(_SYSCALL, pid, 0, 0)
    tracer = _Tracer(pid, fault, calls)
    while True:
        thread, status = os.waitpid(tracer.waits_for, _ALL_THREADS)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == pid:
                return os.WIFSIGNALED(status)
            continue
        stopped = os.WSTOPSIG(status)
        with suppress(ProcessLookupError):  # the process has ended meanwhile
            if stopped == signal.SIGTRAP | 0x80:
                tracer.stop(thread)
            else:
                # A new thread begins with a stop of its own; other signals are the process's.
                _resume(thread, 0 if stopped in (signal.SIGTRAP, signal.SIGSTOP) else stopped)


@dataclass
class _Tracer:
    """What is known of a process that is being traced.

    Attributes:
        pid: its number.
        fault: what happens to it.
        calls: names of those that were counted.
        counting: whether they are, now.
        struck: threads that are in a call that was changed.
    """

    pid: int
    fault: Fault
    calls: list[str]
    counting: bool = False
    struck: set[int] = field(default_factory=set)

    @property
    def waits_for(self) -> int:
        """Any thread, or the only one."""
        return -1 if self.counting or self.fault.how is How.HELD else self.pid

    def stop(self, thread: int) -> None:
        """A thread enters or leaves a call."""
        entering, number, arguments = _info(thread)
        if number == _MARK and entering:
            self.counting = not self.counting
        elif not entering and thread in self.struck:
            self.struck.remove(thread)
            _leave(thread, self.fault)
        elif self._counts(thread) and entering and number in CALLS and not (number == 1 and arguments[0] < 3):
            making = number == _OPEN_AT and arguments[2] & (os.O_CREAT | os.O_TRUNC)
            self.calls.append("create" if making else CALLS[number])
            at = len(self.calls)
            if self.fault.how is How.HELD and at >= self.fault.at > 0:
                return
            if at == self.fault.at:
                self.struck.add(thread)
                _strike(thread, number, arguments, self.fault)
        _resume(thread)

    def _counts(self, thread: int) -> bool:
        """Whether calls of a thread are counted; those of the first are not where calls are held."""
        return self.counting and not (thread == self.pid and self.fault.how is How.HELD)


def _strike(thread: int, number: int, arguments: tuple[int, ...], fault: Fault) -> None:
    """Change a call that is about to be made."""
    if fault.how is How.KILLED:
        os.kill(thread, signal.SIGKILL)
    elif (fault.how is How.REFUSED and CALLS[number] != "close") or (
        # Runs differ by a call now and then, and no kernel opens a file and reports an error.
        fault.how is How.REPORTED and CALLS[number] == "open"
    ):
        _set(thread, _NUMBER, _NO_CALL)
    elif fault.how in (How.SHORT, How.TORN) and number in _MOVING:
        which = _MOVING[number]
        # Half of the bytes, or the first of several pieces.
        _set(thread, _ARGUMENTS[which], max(arguments[which] // 2, 1))


def _leave(thread: int, fault: Fault) -> None:
    """Change what a call returns."""
    if fault.how in (How.REFUSED, How.REPORTED):
        _set(thread, _RAX, (1 << 64) - fault.error)
    elif fault.how is How.TORN:
        os.kill(thread, signal.SIGKILL)


class _Info(ctypes.Structure):
    """The kernel's `ptrace_syscall_info`, as far as of an entry."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("pointers", ctypes.c_uint64 * 2),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


def _info(thread: int) -> tuple[bool, int, tuple[int, ...]]:
    info = _Info()
    _ptrace(_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
    return info.op == _ENTRY, info.number, tuple(info.arguments)


def _set(thread: int, register: int, value: int) -> None:
    _ptrace(_POKEUSER, thread, register, value)


def _resume(thread: int, sent: int = 0) -> None:
    _ptrace(_SYSCALL, thread, 0, sent)


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_uint64, ctypes.c_uint64]


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    if _LIBC.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")
