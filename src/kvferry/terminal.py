"""Make text from clients, peers and files safe to print: replace control characters, limit the width."""

from __future__ import annotations

import shutil
import textwrap

_WIDEST, _NARROWEST = 80, 40


def printable(text: str, instead: str = "?") -> str:
    r"""Replace the unprintable characters of a text, so that it is safe to print on a terminal.

    Args:
        text: text from an engine, a file or a request.
        instead: replacement for each unprintable character.

    >>> printable("cmpl-\x1b[31m5f\n")
    'cmpl-?[31m5f?'
    """
    return "".join(each if each.isprintable() else instead for each in text)


def shown(text: str, most: int = 100) -> str:
    r"""Escape and shorten a text from a client or a peer, for a log line or a message.

    Args:
        text: text to show. Its unprintable characters are replaced by escape sequences.
        most: maximum number of characters to keep. If `text` is longer, its middle is replaced by a note with
            the length of `text`. Its end is kept, because ids differ there.

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
    """Wrap a text into lines of at most `report_width` columns, and replace unprintable characters.

    An empty text gives one empty line.

    Args:
        text: text to wrap.
        indent: indentation of every line, in columns.
        hanging: additional indentation of all lines except the first, in columns.
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
    """Return the width of reports in columns: the terminal's width, but at least 40 and at most 80."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
