"""Standard output of commands: handle a closed pipe and a full disk."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvferry.terminal import printable

_FAILED = 1
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output at the end of the block; if that fails, report it and exit with code 1.

    A closed pipe (``kvferry cache ls DIR | head -1``) is not reported as an error.

    Raises:
        SystemExit: not all output was written.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # else the interpreter does as it exits, and has no good word for a fault
    except OSError as error:
        unread = error.errno == errno.EPIPE
        if error.filename is not None or not (unread or error.errno in _NO_ROOM):
            raise
        _drop_the_rest()
        if not unread:
            print_error(f"cannot write to standard output: {error.strerror}; see where it is sent to")
        sys.exit(_FAILED)


def check_output() -> None:
    """Check before a long task that standard output can be written. Does not detect a full disk.

    Raises:
        OSError: it cannot be written; `flushed_output` reports it.
    """
    try:
        fd = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # there is none, and what is printed goes nowhere
    os.write(fd, b"")  # a device that is always full says so of nothing, too
    reader = select.poll()
    reader.register(fd, 0)
    if any(event & select.POLLERR for _, event in reader.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_error(sentence: str) -> None:
    """Print an error on standard error, with unprintable characters removed. Ignore errors of writing."""
    with suppress(OSError):
        print("\n".join(map(printable, f"kvferry: {sentence}".split("\n"))), file=sys.stderr)


def _drop_the_rest() -> None:
    """Discard buffered output, so that the interpreter does not try to write it again as it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
