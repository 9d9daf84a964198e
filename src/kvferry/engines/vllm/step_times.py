"""How fast prompts are computed, seen from the scheduler: by the time from one step to the next."""

from __future__ import annotations

import time
from typing import Any

from kvferry.cache.speeds import Speeds

_PREFILL_TOKENS = 128
"""Tokens of a step from which on its time tells how fast prompts are computed."""


class StepTimes:
    """Tells `Speeds` what steps took."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._last = 0.0, 0

    def scheduled(self, output: Any) -> None:
        """A step is scheduled; the one before it is done if one of its requests goes on."""
        now, (began, tokens) = time.monotonic(), self._last
        if tokens >= _PREFILL_TOKENS and output.scheduled_cached_reqs.req_ids:
            self._speeds.computed(tokens, now - began)
        self._last = now, output.total_num_scheduled_tokens
