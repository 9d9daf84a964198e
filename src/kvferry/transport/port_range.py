"""A range of TCP ports that a firewall can name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import ConfigError

_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_HIGHEST = 65_535


@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports from `first` to `last`, both included. The text is also UCX's form.

    >>> [*PortRange(5600, 5602)], str(PortRange(5600, 5602))
    ([5600, 5601, 5602], '5600-5602')
    """

    first: int
    last: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def parse_port_range(text: str | None) -> PortRange | None:
    """Parse a range of ports, such as ``20000-20999``; None stands for all ports.

    Raises:
        ConfigError: the text is not a range of ports from 1 to 65535.
    """
    if text is None:
        return None
    found = _RANGE.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= _HIGHEST:
        raise ConfigError(
            f"ports is {text!r}; write the first and the last port, 1 to {_HIGHEST}, such as 20000-20999"
        )
    return PortRange(int(found[1]), int(found[2]))
