"""Make text from clients, peers and files safe to print: replace control characters, limit the width."""

from __future__ import annotations

import os
import re
import sys
import textwrap

_WIDEST, _NARROWEST = 80, 40
_BETWEEN_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=[^\W\d]|%)")
_KEPT = "\N{NO-BREAK SPACE}"


def printable(text: str, instead: str = "?") -> str:
    r"""Replace the unprintable characters of a text, so that it is safe to print on a terminal.

    >>> printable("cmpl-\x1b[31m5f\n")
    'cmpl-?[31m5f?'
    """
    return "".join(each if each.isprintable() else instead for each in text)


def shown(text: str, most: int = 100) -> str:
    r"""Escape and shorten a text from a client or a peer to `most` characters, for a log line or a message.

    >>> shown("cmpl-\x1b[31m5f\n")
    'cmpl-\\x1b[31m5f\\n'
    >>> shown("x" * 1_048_576 + "-1b2c3d4e", 24)
    'xxxxxxxxxxxx...(1048585 characters)...xxx-1b2c3d4e'
    """
    if len(text) > most:
        head = most // 2
        # Ids differ at their end.
        text = f"{text[:head]}...({len(text)} characters)...{text[head - most :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrap(text: str, width: int | None, indent: int = 0, hanging: int = 0) -> list[str]:
    r"""Split a text into lines of at most `width` columns, at spaces. A number stays with the word after it.

    An empty text gives one empty line, a `width` of None a single line. `hanging` is additional indentation
    of all lines except the first.

    >>> wrap("read 2.69 MiB in 3.7 ms", 12)
    ['read', '2.69 MiB in', '3.7 ms']
    """
    if width is None:
        return [" " * indent + text]
    lines = textwrap.wrap(
        _BETWEEN_NUMBER_AND_UNIT.sub(_KEPT, text),
        max(width, 1),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines] or [""]


def wrapped(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Wrap a text as `wrap` does to `report_width`, and replace unprintable characters."""
    return wrap(printable(text), report_width(), indent, hanging)


def report_width() -> int | None:
    """Return the width of prose in columns: from 40 to 80, or None for no limit."""
    width = output_width()
    return None if width is None else max(_NARROWEST, min(_WIDEST, width))


def output_width() -> int | None:
    """Return the columns of standard output by ``COLUMNS`` or the terminal; None without a terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDEST
    except (AttributeError, OSError, ValueError):
        return None
