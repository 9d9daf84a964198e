"""Marks of tests that run with many set-ups of real engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.vllm_engine.runners import RUNNER


def engines(fixture: str, representative: Iterable[Any], others: Iterable[Any]) -> list[pytest.MarkDecorator]:
    """Run a module's tests with each set-up. Those with `others` are long."""
    short = [*representative]
    return [pytest.mark.engine, families(fixture, [*short, *others], *map(str, short))]


def with_second_runner(*setups: Any) -> tuple[Any, ...]:
    """Set-ups that are short with vLLM's second runner; none with the first, with which they are long."""
    return setups if RUNNER == "2" else ()


def families(fixture: str, setups: Iterable[Any], *short: str) -> pytest.MarkDecorator:
    """Run a test with each set-up, named by its text. It is long with all but those named.

    All tests of a module get the same set-ups in the same order, so that each set-up is started once.
    """
    named = {str(one): one for one in setups}
    assert named.keys() >= {*short}, f"no set-up is called {set(short) - named.keys()}"
    long = {name: [] if name in short else [pytest.mark.long] for name in named}
    cases = [
        pytest.param(one, id=name, marks=[pytest.mark.xdist_group(name), *long[name]])
        for name, one in named.items()
    ]
    return pytest.mark.parametrize(fixture, cases, indirect=True)
