"""Weights that change: which epochs are stale, and what makes vLLM's worker say so."""

from __future__ import annotations

from operator import methodcaller
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.messages import (
    CHANGED,
    MOVED,
    LoadOrder,
    LoadPart,
    Report,
    StepOrders,
    StepReports,
    StoreOrder,
)
from kvferry.connector.worker import StaleEpochs, WorkerHalf
from kvferry.engines.vllm.compat import model as weights
from kvferry.planning.select import LoadSpan
from support.loads import made_up_load, only_read


def test_no_epoch_is_stale_while_weights_stay() -> None:
    epochs = StaleEpochs()
    epochs.current = 0
    epochs.current = 1
    assert 0 not in epochs
    assert 1 not in epochs


def test_an_epoch_that_has_seen_other_weights_is_stale_and_the_next_is_not() -> None:
    epochs = StaleEpochs()
    epochs.current = 1
    epochs.on_weights_changed()
    assert [epoch in epochs for epoch in (0, 1, 2)] == [True, True, False]


def test_an_epoch_in_which_nothing_was_computed_before_the_change_is_good() -> None:
    epochs = StaleEpochs()
    epochs.current = 1
    epochs.on_weights_changed()  # the scheduler was reset before: its next step is of epoch 2
    epochs.current = 2
    assert 2 not in epochs
    epochs.on_weights_changed()
    assert 2 in epochs


def test_the_first_epoch_is_stale_even_if_nothing_was_computed() -> None:
    """Its names are those of the weights of the start."""
    epochs = StaleEpochs()
    epochs.on_weights_changed()
    assert 0 in epochs


def test_all_epochs_are_stale_once_the_cache_has_moved() -> None:
    epochs = StaleEpochs()
    assert not epochs
    epochs.current = 1
    epochs.moved = True
    assert epochs
    assert 1 in epochs
    assert 1 << 60 in epochs
    assert epochs.reason == MOVED
    epochs.on_weights_changed()
    assert epochs.reason == MOVED
    others = StaleEpochs()
    others.on_weights_changed()
    assert others
    assert others.reason == CHANGED


def test_only_steps_that_compute_or_load_write_the_cache() -> None:
    assert not StepOrders().writes_cache
    assert StepOrders(computes=True).writes_cache
    assert StepOrders(loads=[made_up_load("a", LoadSpan(0, 8, 9), [])]).writes_cache


def test_the_last_stale_epoch_of_any_worker_counts() -> None:
    assert not StepReports()
    one, other = StepReports(stale=0), StepReports(stale=2)
    assert one
    one.add(other)
    one.add(StepReports())
    assert one.stale == 2
    none = StepReports()
    none.add(StepReports(stale=0))
    assert none.stale == 0


def test_a_cache_that_has_moved_on_any_worker_is_reported() -> None:
    all_workers = StepReports()
    all_workers.add(StepReports())
    assert not all_workers
    all_workers.add(StepReports(moved=True))
    all_workers.add(StepReports())
    assert all_workers.moved
    assert all_workers


def test_a_worker_whose_cache_has_moved_loads_and_stores_nothing_whatever_the_epoch() -> None:
    mover, words = mock.Mock(), mock.Mock()
    mover.take_reports.return_value, mover.take_arenas.return_value = [], {}
    transfers = mock.Mock(words=words)
    half = WorkerHalf(transfers=transfers, mover=mover)
    transfers.results.return_value = []
    before, after = (made_up_load(name, LoadSpan(0, 8, 9), []) for name in ("before", "after"))
    copied = LoadOrder("part", (), first=True)
    half.begin(StepOrders(loads=[before], parts=[LoadPart("before", copied, last=True)]))
    half.on_cache_moved()
    words.invalidate_all.assert_called_once_with()
    assert half.take_reports().moved
    half.begin(StepOrders(epoch=7, computes=True, loads=[after]))
    half.save(StepOrders(epoch=7, stores=[StoreOrder("one", (), (), range(0))]), lambda: None)
    mover.store.assert_not_called()
    half.begin(StepOrders(epoch=7, parts=[only_read("after")]))
    transfers.submit.assert_not_called()
    mover.take_reports.return_value = [("part", Report(None))]
    half.ended()
    reports = half.take_reports()
    failures = {name: report.failure for name, report in reports.reports.items()}
    assert failures == {"one": MOVED, "part": None, "before": MOVED, "after": MOVED}


CALLS = (
    "reset_weights", "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update",
)  # fmt: skip


class Worker:
    """Has the calls that vLLM's workers have."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.model = SimpleNamespace(load_weights=lambda of: self.done.append(("load", of)))
        self.draft = SimpleNamespace(load_weights=lambda of: self.done.append(("draft", of)))
        for name in CALLS:
            setattr(self, name, lambda name=name: self.done.append(name))
        self.model_runner = SimpleNamespace(reload_weights=lambda: self.done.append("runner"))

    def get_model(self) -> Any:
        return self.model

    def get_draft_model(self) -> Any:
        return self.draft

    def reload_weights(self, *, weights_path: str) -> None:
        self.done.append(weights_path)

    def compute(self) -> None:
        self.done.append("compute")


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (lambda one: one.reload_weights(weights_path="/there"), "/there"),
        *((methodcaller(name), name) for name in CALLS),
        (lambda one: one.model_runner.reload_weights(), "runner"),
        (lambda one: one.model.load_weights([1]), ("load", [1])),
        (lambda one: one.draft.load_weights([1]), ("draft", [1])),
    ],
)
def test_every_change_of_weights_is_reported_before_it_begins(monkeypatch, call, done) -> None:
    worker = Worker()
    monkeypatch.setattr(weights, "worker_of", lambda _: worker)
    weights.hook_weight_changes(None, lambda: worker.done.append("told"))
    worker.compute()
    call(worker)
    assert worker.done == ["compute", "told", done]


def test_an_engine_without_a_draft_model_has_its_weights_watched(monkeypatch) -> None:
    worker = Worker()
    worker.draft = None
    monkeypatch.setattr(weights, "worker_of", lambda _: worker)
    weights.hook_weight_changes(None, lambda: worker.done.append("told"))
    worker.update_weights()
    assert worker.done == ["told", "update_weights"]
