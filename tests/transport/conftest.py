"""Producers and readers that end with the test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.geometry import RankGeometry
from support.engines import EngineSpec, Family
from transport.pair import INCARNATION, KeptValidator, Producer, Reader
from transport.producer import Produce

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/transport/" in item.path.as_posix():
            item.add_marker(pytest.mark.transport)


class World:
    """Starts what a test needs."""

    def __init__(self, stack: ExitStack, shared: Producer, validator: KeptValidator) -> None:
        self._stack, self._shared, self._validator = stack, shared, validator

    def producer(
        self, spec: EngineSpec, families: tuple[Family, ...], tables=None, seed: int = 0
    ) -> Producer:
        """A process of its own."""
        producer = Producer()
        self._stack.callback(producer.end)
        return producer.become(_order(spec, families, tables, seed))

    def shared_producer(
        self, spec: EngineSpec, families: tuple[Family, ...], tables=None, seed: int = 0, settings=None
    ) -> Producer:
        """The process that all tests share which do it no harm; holds this now, and nothing else."""
        return self._shared.become(_order(spec, families, tables, seed, settings))

    def reader(self, rank: RankGeometry, **options) -> Reader:
        # The child process of the shared validator has the transports of the environment that it started in.
        if "UCX_TLS" not in os.environ:
            options.setdefault("validator", self._validator)
        reader = Reader(rank, f"D{next(_numbers)}.{os.getpid()}", **options)
        self._stack.callback(reader.end)
        return reader


def _order(spec: EngineSpec, families: tuple[Family, ...], tables, seed: int, settings=None) -> Produce:
    return Produce(f"P{next(_numbers)}.{os.getpid()}", spec, families, tables, seed, INCARNATION, settings)


@pytest.fixture(scope="session")
def shared_producer() -> Iterator[Producer]:
    producer = Producer()
    yield producer
    producer.end()


@pytest.fixture(scope="session")
def shared_validator() -> Iterator[KeptValidator]:
    validator = KeptValidator()
    yield validator
    validator.end()


@pytest.fixture
def world(shared_producer, shared_validator) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, shared_producer, shared_validator)


@pytest.fixture
def over_tcp(monkeypatch) -> None:
    """Both processes talk over TCP: a peer that is stopped then really serves nothing."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
