"""Deny system calls to this process, as a container's seccomp profile does."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_NUMBERS = {"x86_64": {"memfd_create": 319}, "aarch64": {"memfd_create": 279}}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_DENY, _ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2


def deny(call: str) -> None:
    """Let a system call fail with EPERM from here on; there is no way back."""
    number = _NUMBERS[platform.machine()][call]
    code = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (_LOAD, 0, 0, 0),
            (_EQUAL, 0, 1, number),
            (_RETURN, 0, 0, _DENY),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    program = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, header, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
