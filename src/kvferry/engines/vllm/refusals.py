"""Requests that a source was to serve and does not: counted, and said without a flood."""

from __future__ import annotations

import logging
import time
from collections import Counter

from kvferry.observe.events import Refused
from kvferry.observe.watch import Watch

logger = logging.getLogger(__name__)


class Refusals:
    """Counts by source and reason, and tells each; the 1st, 10th, 100th, … of a kind is logged."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch or Watch()
        self.counts: Counter[tuple[str, str]] = Counter()

    def say(self, request_id: str, source: str, reason: str) -> None:
        """`source` does not serve a request."""
        self.counts[source, reason] += 1
        self._watch.tell(Refused(request_id, time.monotonic(), source, reason))
        count = self.counts[source, reason]
        if str(count).strip("0") == "1":
            often = f" ({count} requests by now)" if count > 1 else ""
            logger.warning("request %s is not served by %s: %s%s", request_id, source, reason, often)
