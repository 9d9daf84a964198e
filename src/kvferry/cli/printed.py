"""What becomes of a command whose output cannot be written: nobody reads it any more, or there is no room."""

from __future__ import annotations

import errno
import os
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
