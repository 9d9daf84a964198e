"""Read arguments of vLLM's API server."""

from __future__ import annotations

from collections.abc import Sequence


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of an option; None if it is not given. Of several values, the last one counts.

    >>> value_of(["--dtype=float32", "-pp", "2"], "--pipeline-parallel-size", "-pp")
    '2'

    Args:
        arguments: arguments of vLLM's API server.
        names: long and short names of the option. vLLM also accepts underscores in place of the dashes.
    """
    found = None
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else "".join(arguments[index + 1 : index + 2])
    return found
