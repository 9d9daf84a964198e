"""Make text from clients, peers and files safe to print and to log."""

from __future__ import annotations


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
