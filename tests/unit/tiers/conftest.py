from __future__ import annotations

import pytest

from support.stores import Clock, open_store


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return open_store(tmp_path, capacity=1 << 20, clock=clock)
