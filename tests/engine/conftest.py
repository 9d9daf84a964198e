"""Engines are expensive: a pair is started once for all its tests, and only one pair runs at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.namespaces import Host, NotPermitted, hosts_on_a_network
from support.processor import HAS_AVX512, NO_AVX512
from support.vllm_engine import imported
from support.vllm_engine.pair import Pair, Setup
from support.vllm_engine.process import ENVIRONMENT


class _Running:
    """The pair that runs now."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        self._pair: Pair | None = None

    def pair(self, setup: Setup) -> Pair:
        if self._pair is None or self._pair.setup != setup:
            self.close()
            folder = self._folder / str(setup)
            folder.mkdir(parents=True, exist_ok=True)
            self._pair = Pair(setup, folder, self._checkpoints)
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Give later tests the environment that this one found.

    vLLM writes into it when it makes a configuration, and what it writes changes the last bits that engines
    compute.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    imported.context(ENVIRONMENT)  # which takes as long as the first checkpoint, on another core
    return tmp_path_factory.getbasetemp() / "checkpoints"


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Iterator[_Running]:
    pairs = _Running(tmp_path_factory.mktemp("engines"), checkpoints)
    yield pairs
    pairs.close()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, running: _Running) -> Pair:
    """The pair of this module's parameter, a `Setup`."""
    if request.param.options.get("kv_cache_dtype") == "fp8" and not HAS_AVX512:
        pytest.skip(NO_AVX512)
    return running.pair(request.param)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, ...]]:
    try:
        with hosts_on_a_network(2) as hosts:
            yield hosts
    except NotPermitted as error:
        pytest.skip(str(error))
