"""What becomes of a command whose output cannot be written: nobody reads it any more, or there is no room."""

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
def whole_output() -> Iterator[None]:
    """All that is printed here is written when this ends; what is not is one sentence, and exit code 1.

    A reader that has gone (``kvferry cache ls DIR | head -1``) has what it wanted: that is silent.

    Raises:
        SystemExit: not all was written.
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
            complain(f"cannot write to standard output: {error.strerror}; see where it is sent to")
        sys.exit(_FAILED)


def check_output() -> None:
    """Before what takes long: see that somebody reads what will be printed, or that it can be written.

    A disk that is full takes nothing, and so is not found.

    Raises:
        OSError: not so; `whole_output` says it.
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


def complain(sentence: str) -> None:
    """Say what is wrong, if anybody hears it; its words may be those of an engine or a file."""
    with suppress(OSError):
        print("\n".join(map(printable, f"kvferry: {sentence}".split("\n"))), file=sys.stderr)


def _drop_the_rest() -> None:
    """What was printed and not written: the interpreter shall not try again as it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
