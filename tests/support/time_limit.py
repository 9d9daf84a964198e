"""A limit on the time that tests take, for a slow machine: tests that have not begun by then are skipped.

The environment variable `MINUTES` sets it. The tests begin at another place every hour, so that over time all
have their turn. `START` chooses the place, to repeat a run.
"""

from __future__ import annotations

import os
import time
from itertools import groupby

import pytest

MINUTES, START = "KVFERRY_TEST_MINUTES", "KVFERRY_TEST_START"


def setup_of(item: pytest.Item) -> tuple[str, str]:
    """Return what tests that share an engine have in common: their module and their parameters."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return item.nodeid.partition("::")[0], repr(params)


def turned(items: list[pytest.Item], start: int) -> list[pytest.Item]:
    """Return the tests in the same cyclic order from another one on. Those of one engine stay together."""
    groups = [list(some) for _, some in groupby(items, setup_of)]
    first = start % max(len(groups), 1)
    return [item for some in (*groups[first:], *groups[:first]) for item in some]


class TimeLimit:
    """Plugin of pytest that skips tests when the time is over."""

    def __init__(self, minutes: float, start: int) -> None:
        self._minutes, self._start = minutes, start
        self._until = float("inf")

    @classmethod
    def from_environment(cls) -> TimeLimit | None:
        """Return the limit that the environment sets; None if it sets none."""
        if not (minutes := os.environ.get(MINUTES)):
            return None
        return cls(float(minutes), int(os.environ.get(START) or time.time() // 3600))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = turned(items, self._start)

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str:
        self._until = time.monotonic() + 60 * self._minutes
        first = items[0].nodeid if items else "none"
        return f"{self._minutes:g} minutes, beginning with {first} ({START}={self._start})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._until:
            pytest.skip(f"{self._minutes:g} minutes are over")
