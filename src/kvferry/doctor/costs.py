"""Check whether the costs that the transfer planner assumes fit this machine."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from kvferry.doctor.finding import Finding, from_error, note, ok
from kvferry.doctor.reads import ReadTimings
from kvferry.errors import ConfigError
from kvferry.planning.strategy import Costs
from kvferry.transport.costs_file import CostsFile, find_default_costs, load_costs
from kvferry.units import counted
from kvferry.user_cache import expanded

_FAR_OFF = 3.0
"""Largest tolerated factor between measured and expected READ times. It allows for other load."""
_STALE_DAYS = 180
_CALIBRATE = "run kvferry doctor --calibrate while nothing else runs"


def check(path: str | None, found: ReadTimings | None, now: datetime | None = None) -> Finding:
    """Check whether the costs that the transfer planner assumes fit this machine and are recent.

    The costs are the times of copies and READs by which the planner chooses a transfer strategy. They come
    from a costs file, or are built in if there is no file.

    Args:
        path: path of the costs file that the configuration names; None for the user's default file.
        found: measured times of READs on this machine; None to check only the age of the file.
        now: current time, from which the age of the file is computed; None to read the system clock.
    """
    subject = "costs"
    try:
        used = load_costs(path)
        file = expanded(path) if path else find_default_costs()
        written = None if file is None else msgspec.json.decode(file.read_bytes(), type=CostsFile)
    except ConfigError as error:
        return from_error(subject, error, _CALIBRATE)
    if written is None:
        return note(
            subject,
            f"the planner uses built-in costs, measured on another machine{_ratio_text(used, found)}",
            _CALIBRATE,
        )
    whose = written.machine.get("cpu")
    here = found.machine.get("cpu") if found else None
    if here and whose and whose != here:
        return note(subject, f"{file} was measured on another machine ({whose}; this is {here})", _CALIBRATE)
    if found and (ratio := _read_ratio(used, found)) and not 1 / _FAR_OFF < ratio < _FAR_OFF:
        return note(
            subject,
            f"{file} of {written.made[:10]} is far off: a READ takes {ratio:.1f} times the predicted time",
            _CALIBRATE,
        )
    if (days := _age_days(written.made, now)) is not None and days > _STALE_DAYS:
        return note(
            subject,
            f"{file} was measured {counted(round(days), 'day')} ago{_ratio_text(used, found)}",
            _CALIBRATE,
        )
    return ok(subject, f"measured {written.made[:10]}, in {file}{_ratio_text(used, found)}")


def _read_ratio(used: Costs, found: ReadTimings) -> float:
    """Return the measured time of a READ divided by the time that `used` predicts.

    If READs of several sizes were timed, the result is the ratio that differs from 1 by the largest factor.

    Args:
        used: costs that the transfer planner assumes.
        found: measured times of READs on this machine.
    """
    times = [
        seconds / (count * used.read_descriptor_seconds + moved * used.read_byte_seconds)
        for count, moved, seconds in found.timed
    ]
    return max(times, key=lambda each: max(each, 1 / each))


def _ratio_text(used: Costs, found: ReadTimings | None) -> str:
    return f"; a READ takes {_read_ratio(used, found):.1f} times the predicted time" if found else ""


def _age_days(made: str, now: datetime | None) -> float | None:
    try:
        then = datetime.fromisoformat(made)
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds() / 86_400
