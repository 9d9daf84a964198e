"""Read arguments of vLLM's API server."""

from __future__ import annotations

from collections.abc import Sequence


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of an option of vLLM's API server; None if it is not given.

    >>> value_of(["--dtype=float32", "-pp", "2"], "--pipeline-parallel-size", "-pp")
    '2'
    """
    found = None
    # Of several values, the last one counts, and vLLM reads --some_flag as --some-flag.
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found
