"""Text of others, fit for a terminal or a log line: harmless, and no wider or longer than it is."""

from __future__ import annotations

import shutil
import textwrap

_WIDEST, _NARROWEST = 80, 40


def printable(text: str, instead: str = "?") -> str:
    r"""Text that came from elsewhere (an engine, a file, a request), on one line.

    >>> printable("cmpl-\x1b[31m5f\n")
    'cmpl-?[31m5f?'
    """
    return "".join(each if each.isprintable() else instead for each in text)


def shown(text: str, most: int = 100) -> str:
    r"""Text of others for a log line or a message: control characters escaped, its middle left out if long.

    The end stays, because ids differ there.

    >>> shown("cmpl-\x1b[31m5f\n")
    'cmpl-\\x1b[31m5f\\n'
    >>> shown("x" * 1_048_576 + "-1b2c3d4e", 24)
    'xxxxxxxxxxxx...(1048585 characters)...xxx-1b2c3d4e'
    """
    if len(text) > most:
        head = most // 2
        text = f"{text[:head]}...({len(text)} characters)...{text[head - most :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Lines of a report, printable and with nothing that runs over; never none.

    Args:
        text: from wherever.
        indent: of every line, in columns.
        hanging: of all but the first, on top of `indent`.
    """
    lines = textwrap.wrap(
        printable(text),
        report_width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    )
    return lines or [""]


def report_width() -> int:
    """Columns of what is read in sentences: 80, or as many as the terminal has if these are fewer."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
