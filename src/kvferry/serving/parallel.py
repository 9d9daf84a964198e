"""Parallel sizes of an engine, and its number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigError

_PIPELINE = ("--pipeline-parallel-size", "-pp")
_CONTEXT = ("--prefill-context-parallel-size", "-pcp")
_DATA = ("--data-parallel-size", "-dp")
_DATA_LOCAL = ("--data-parallel-size-local", "-dpl")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes of an engine on this machine.

    >>> Parallel(tensor=2, data=2).ranks
    4

    Attributes:
        tensor, pipeline, context: ranks of one data-parallel replica. Decode-context parallelism shares the
            tensor-parallel ranks.
        data: replicas that run on this machine.
    """

    tensor: int
    pipeline: int = 1
    context: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of workers on this machine, each with devices of its own."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        """Return the sizes above 1, for example ``tensor 2 x data 2``."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "data": self.data}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


def parallel_of(tensor: int, arguments: Sequence[str]) -> Parallel:
    """Read the parallel sizes of an engine.

    Args:
        tensor: its tensor-parallel ranks.
        arguments: arguments of vLLM's API server.

    Raises:
        ConfigError: a size is not a whole number of at least 1.
    """
    data = _size(arguments, _DATA)
    return Parallel(
        tensor,
        _size(arguments, _PIPELINE) or 1,
        _size(arguments, _CONTEXT) or 1,
        _size(arguments, _DATA_LOCAL) or data or 1,
    )


def _size(arguments: Sequence[str], names: tuple[str, str]) -> int | None:
    """Return the last value of a flag, the one that vLLM takes; None if it is not given."""
    found = None
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") not in names:
            continue
        value = value if equals else "".join(arguments[index + 1 : index + 2])
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{flag} is {value!r}, it must be a whole number of at least 1")
        found = int(value)
    return found
