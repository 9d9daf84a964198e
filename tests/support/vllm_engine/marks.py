"""Marks of tests that run with many set-ups of real engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def engines(fixture: str, representative: Iterable[Any], others: Iterable[Any]) -> list[pytest.MarkDecorator]:
    """Run a module's tests with each set-up, named by its text; with `others` only where all families run."""
    setups = [pytest.param(one, id=str(one)) for one in representative]
    setups += [pytest.param(one, id=str(one), marks=pytest.mark.long) for one in others]
    return [pytest.mark.engine, pytest.mark.parametrize(fixture, setups, indirect=True)]
