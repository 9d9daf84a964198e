"""Write commands' output and errors. Handle a closed pipe and a full disk."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvferry.terminal import printable

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""

_FAILED = 1
# A full disk or quota, a limit of file sizes, a broken disk.
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush standard output at the end of a ``with`` statement, and handle write errors.

    If the disk is full, print the error and exit with code 1. If the reader of a pipe has closed it
    (``kvferry cache ls DIR | head -1``), exit with code 1 without a message.

    Raises:
        SystemExit: the disk is full or failed, or the pipe is closed.
        OSError: another error, or an error that names a file, so that it does not concern standard output.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit the interpreter would report an error badly
    except OSError as error:
        # An error that names a file does not concern standard output.
        unread = error.errno == errno.EPIPE
        if error.filename is not None or not (unread or error.errno in _NO_ROOM):
            raise
        _discard_output()
        if not unread:
            print_error(f"cannot write to standard output: {error.strerror}; check where it is redirected to")
        sys.exit(_FAILED)


def check_output() -> None:
    """Check that standard output can be written. Commands call this before a long task.

    The check does not detect a full disk.

    Raises:
        OSError: standard output cannot be written. `flushed_output` reports this error.
    """
    try:
        fd = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return  # there is no standard output, and printed text is dropped
    os.write(fd, b"")  # fails on a device that is always full, such as /dev/full
    if not hasattr(select, "poll"):
        return  # Windows
    # The reader of a pipe may have gone: writing nothing does not show it.
    reader = select.poll()
    reader.register(fd, 0)
    if any(event & select.POLLERR for _, event in reader.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_error(sentence: str) -> None:
    """Print an error message to standard error. Ignore write errors."""
    # A message may quote what a peer or a file says, with control characters of terminals.
    with suppress(OSError):
        print("\n".join(map(printable, f"kvferry: {sentence}".split("\n"))), file=sys.stderr)


def _discard_output() -> None:
    """Discard buffered output."""
    # The interpreter would try to write it again at exit, and print an error of its own.
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
