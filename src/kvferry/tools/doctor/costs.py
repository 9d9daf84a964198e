"""Check whether the costs that the transfer planner assumes fit this machine."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from kvferry.common.errors import ConfigError
from kvferry.common.files import expanded
from kvferry.common.units import counted
from kvferry.planning import Costs
from kvferry.tools.doctor.finding import Finding, from_error, note, ok
from kvferry.tools.doctor.reads import ReadTimings
from kvferry.transport import CostsFile, find_default_costs, load_costs

# Largest tolerated factor between measured and expected times of READs. Other load on the machine is normal.
_FAR_OFF = 3.0
_STALE_DAYS = 180
_CALIBRATE = "run kvferry doctor --calibrate while nothing else runs"


def check(path: str | None, found: ReadTimings | None, now: datetime | None = None) -> Finding:
    """Check whether the costs that the transfer planner assumes fit this machine and are recent.

    Args:
        path: costs file that the configuration names; None for the user's default file.
        found: measured times of READs on this machine; None to check only the age of the file.
    """
    try:
        used = load_costs(path)
        file = expanded(path) if path else find_default_costs()
        written = None if file is None else msgspec.json.decode(file.read_bytes(), type=CostsFile)
    except ConfigError as error:
        return from_error("costs", error, _CALIBRATE)
    ratio = _read_ratio(used, found) if found else None
    slower = f"; a READ takes {ratio:.1f} times the predicted time" if ratio else ""
    if written is None:
        return note(
            "costs", f"the planner uses built-in costs, measured on another machine{slower}", _CALIBRATE
        )
    made, whose = written.made[:10], written.machine.get("cpu")
    here = found.machine.get("cpu") if found else None
    days = _age_days(written.made, now)
    if here and whose and whose != here:
        wrong = f"{file} was measured on another machine ({whose}; this is {here})"
    elif ratio and not 1 / _FAR_OFF < ratio < _FAR_OFF:
        wrong = f"{file} of {made} is far off: a READ takes {ratio:.1f} times the predicted time"
    elif days is not None and days > _STALE_DAYS:
        wrong = f"{file} was measured {counted(round(days), 'day')} ago{slower}"
    else:
        return ok("costs", f"measured {made}, in {file}{slower}")
    return note("costs", wrong, _CALIBRATE)


def _read_ratio(used: Costs, found: ReadTimings) -> float:
    """Return the measured time of a READ divided by the time that `used` predicts.

    Of several sizes of READs, the one whose ratio differs from 1 by the largest factor counts.
    """
    times = [
        seconds / (count * used.read_descriptor_seconds + moved * used.read_byte_seconds)
        for count, moved, seconds in found.timed
    ]
    return max(times, key=lambda each: max(each, 1 / each))


def _age_days(made: str, now: datetime | None) -> float | None:
    try:
        then = datetime.fromisoformat(made)
    except ValueError:
        return None
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - then).total_seconds() / 86_400
