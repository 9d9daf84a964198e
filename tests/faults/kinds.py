"""All kinds of faults, by name: `KINDS` is filled where their trials are defined."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from faults.values import Area, Fault, Kind, Trial

KINDS: dict[str, Kind] = {}


def kind(name: str, area: Area, says: str, **more: Any) -> Callable[[Any], Any]:
    """Declare a kind of fault by a coroutine function of a stage, a `Trial` to fill, and a random.Random."""

    def declare(
        trial: Callable[[Any, Trial, random.Random], Awaitable[None]],
    ) -> Callable[[Any, Fault], Awaitable[Trial]]:
        async def tried(stage: Any, fault: Fault) -> Trial:
            found = Trial()
            await trial(stage, found, random.Random(fault.seed))
            return found

        KINDS[name] = Kind(name, area, says, tried, **more)
        return tried

    return declare
