"""What all tests of engines need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY


@pytest.fixture(autouse=True)
def own_metrics() -> Iterator[None]:
    """Take out of the process's registry what a test has put in, so that no other test finds it."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
