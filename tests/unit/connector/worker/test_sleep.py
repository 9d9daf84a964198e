"""A worker half whose engine sleeps: its KV cache has no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector import worker as module
from kvferry.connector.config import ConnectorConfig
from kvferry.connector.messages import ASLEEP, StepOrders, StoreOrder
from kvferry.connector.worker import WorkerHalf
from kvferry.planning.select import LoadSpan
from kvferry.tools.models.layout import EngineShape, lay_out
from support.loads import made_up_load, only_read
from support.models import attention, model


class Transfers:
    """Notes what is done to the transfers of one run of a worker."""

    made: list[Transfers]

    def __init__(self, name: str, geometry: Any, words: Any, settings: Any, on_result: Any) -> None:
        self.name, self.words, self.card = name, words, f"card of {words.incarnation}"
        self.open, self.submitted = True, list[Any]()
        self.made.append(self)

    def warm_up(self) -> None: ...

    def results(self) -> list[Any]:
        return []

    def submit(self, *orders: Any, idle: bool = False) -> None:
        self.submitted += orders

    def close(self) -> None:
        self.open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Transfers]:
    Transfers.made = []
    monkeypatch.setattr(module, "Transfers", Transfers)
    monkeypatch.setattr(module, "_transfer_settings", lambda _: mock.Mock())
    return Transfers.made


@pytest.fixture
def half(made: list[Transfers]) -> Iterator[WorkerHalf]:
    (rank,) = lay_out(model(attention()), EngineShape(1, (1,), 16, "LBHNC", 100))
    mover = mock.Mock()
    mover.take_reports.return_value, mover.take_arenas.return_value = [], {}
    one = WorkerHalf(mover=mover)
    one.start("e", rank, ConnectorConfig())
    yield one
    one.shutdown()


def test_a_woken_worker_has_new_transfers_under_a_new_name(half: WorkerHalf, made: list[Transfers]) -> None:
    (first,) = made
    first.words.end([3])
    for _ in range(2):
        half.fall_asleep()
    assert not first.open
    for _ in range(2):
        half.wake()
    _, second = made
    assert second.open
    assert second.name != first.name
    assert half.info.card == second.card
    generations = np.asarray([word & 0xFFFFFFFF for word in second.words.array.tolist()])
    assert generations.nonzero()[0].tolist() == [3], "the scheduler counts on"


def test_while_it_sleeps_nothing_is_loaded_or_stored(half: WorkerHalf, made: list[Transfers]) -> None:
    half.fall_asleep()
    half.begin(StepOrders(loads=[made_up_load("a", LoadSpan(0, 8, 9), [[1]])], parts=[only_read("a")]))
    half.save(StepOrders(stores=[StoreOrder("one", (), (), range(0))]), lambda: None)
    assert made[0].submitted == []
    half._mover.store.assert_not_called()
    half.ended()
    reports = half.take_reports()
    assert (reports.reports["a"].failure, reports.reports["one"].failure) == (ASLEEP, ASLEEP)


def test_memory_that_a_load_writes_is_not_given_up(half: WorkerHalf, made: list[Transfers]) -> None:
    half.begin(StepOrders(loads=[made_up_load("a", LoadSpan(0, 8, 9), [[1]])], parts=[only_read("a")]))
    with pytest.raises(ConfigError, match="pause it first"):
        half.fall_asleep()
    assert made[0].open


def test_chunks_are_copied_to_the_end_before_the_memory_goes(half: WorkerHalf) -> None:
    half.fall_asleep()
    half._mover.finish.assert_called_once_with()


def test_words_of_changed_weights_stay_invalid_after_the_engine_wakes_up(
    half: WorkerHalf, made: list[Transfers]
) -> None:
    half.on_weights_changed()
    half.fall_asleep()
    half.wake()
    assert half.info.stale == 0
    assert not made[-1].words.array.any()
