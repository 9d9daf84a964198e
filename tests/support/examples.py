"""Numbers of examples that properties draw. `KVFERRY_TEST_EXAMPLES` multiplies all of them."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FACTOR = float(os.environ.get("KVFERRY_TEST_EXAMPLES", "1"))


def examples(count: int, **more: Any) -> settings:
    """Return hypothesis settings that draw `count` examples, times the factor."""
    return settings(max_examples=max(1, round(count * FACTOR)), **more)
