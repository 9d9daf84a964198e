"""How busy a machine is with other work during a round of a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

MOST_BUSY, MOST_STOLEN = 0.10, 0.02
"""Shares of all cores' time up to which a round is quiet: other processes', and the hypervisor's."""

_BEFORE_SECONDS = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
_IDLE, _WAITING, _STEAL, _COUNTED = 3, 4, 7, 8
"""Fields of the line ``cpu`` of /proc/stat. The ones after `_COUNTED` are parts of earlier ones."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The load of the machine around a round. Shares are of all cores' time.

    Attributes:
        before: share that other processes took just before the round.
        during: share that other processes took during the round.
        stolen: share that the hypervisor gave to other machines during the round.
        cpu_seconds: processor time of this process and its descendants during the round.
    """

    before: float = 0.0
    during: float = 0.0
    stolen: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def quiet(self) -> bool:
        """True if other work can have had little influence on the round."""
        return max(self.before, self.during) <= MOST_BUSY and self.stolen <= MOST_STOLEN

    def as_json(self) -> dict[str, float]:
        """Return the attributes, rounded, as values for JSON."""
        return {name: round(value, 4) for name, value in asdict(self).items()}

    @staticmethod
    def of(values: Any) -> Conditions:
        """Return the conditions that `as_json` has returned as `values`."""
        return Conditions(**values)


QUIET = Conditions()
"""Conditions in which nothing else runs."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Times since the machine's start, in seconds, summed over its cores.

    Attributes:
        total: all time.
        busy: time in which a core worked.
        stolen: time that the hypervisor gave to other machines.
        own: time that this process and its descendants worked. Those that have ended do not count.
    """

    total: float
    busy: float
    stolen: float
    own: float

    def shares_since(self, earlier: CpuTimes) -> tuple[float, float]:
        """Return the shares of the time since `earlier` that other processes and the hypervisor took.

        >>> CpuTimes(20.0, 9.0, 1.0, 4.0).shares_since(CpuTimes(10.0, 3.0, 0.0, 2.0))
        (0.4, 0.1)
        """
        total = max(self.total - earlier.total, 1 / _TICKS)
        # Both times are counted in ticks, at different moments, so the difference may be below 0.
        others = max(self.busy - earlier.busy - (self.own - earlier.own), 0.0)
        return others / total, (self.stolen - earlier.stolen) / total


def cpu_times() -> CpuTimes:
    """Read the times of the machine, and of this process and its descendants."""
    line = _STAT.read_text().partition("\n")[0].split()
    fields = [int(each) / _TICKS for each in line[1 : 1 + _COUNTED]]
    idle = fields[_IDLE] + fields[_WAITING] + fields[_STEAL]
    return CpuTimes(sum(fields), sum(fields) - idle, fields[_STEAL], _own_seconds())


def _own_seconds() -> float:
    process, seconds = psutil.Process(), 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


@dataclass(slots=True)
class Watched:
    """A round that is watched. `conditions` is set when it has ended."""

    conditions: Conditions = QUIET


@contextmanager
def watched(
    read: Callable[[], CpuTimes] = cpu_times, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Watched]:
    """Watch the machine for a moment, then while the ``with`` block runs a round.

    Args:
        read: function that reads the times.
        sleep: function that lets seconds pass.
    """
    first = read()
    sleep(_BEFORE_SECONDS)
    begin, found = read(), Watched()
    yield found
    end, (before, _) = read(), begin.shares_since(first)
    found.conditions = Conditions(before, *end.shares_since(begin), end.own - begin.own)
