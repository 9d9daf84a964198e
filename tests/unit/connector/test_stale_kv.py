"""Peers and tiers are stopped when weights change, or when the KV cache moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvferry.connector.events import MissReason, SourceMiss
from kvferry.connector.messages import CHANGED, MOVED, StepReports
from kvferry.connector.scheduler import SchedulerHalf
from unit.connector.test_calm_steps import ASKS, PROMPT, ask, started


class Parts:
    """A scheduler half whose peers and tiers remember what they are told."""

    def __init__(self, half: SchedulerHalf) -> None:
        self.half, self.peering, self.tiering = half, mock.Mock(), mock.Mock()
        half._peering, half._tiering = self.peering, self.tiering

    def report(self, **given: Any) -> None:
        self.half.take_reports(StepReports(**given))

    def suspended(self) -> list[str]:
        return [call.args[0] for call in self.tiering.suspend.call_args_list]


@pytest.fixture
def parts() -> Iterator[Parts]:
    with started() as half:
        peering = half._peering
        yield Parts(half)
        half._peering = peering


def test_no_part_stops_while_no_kv_is_stale(parts: Parts) -> None:
    parts.report()
    parts.half.reset()
    parts.peering.stop.assert_not_called()
    assert not parts.suspended()


def test_a_cache_that_has_moved_ends_peers_and_tiers_once_and_for_good(parts: Parts) -> None:
    for _ in range(2):
        parts.report(moved=True)
    parts.peering.stop.assert_called_once_with(MOVED)
    assert parts.suspended() == [MOVED]
    parts.half.reset()
    assert parts.suspended() == [MOVED, MOVED], "a reset makes tiers usable, so they are suspended again"
    parts.report(stale=0)
    assert parts.suspended() == [MOVED, MOVED], "the reason stays"


@pytest.mark.parametrize("absent", ["peering", "tiering"])
@pytest.mark.parametrize("reported", [{"moved": True, "stale": 0}, {"stale": 0}])
def test_parts_that_an_engine_lacks_are_not_stopped(
    parts: Parts, absent: str, reported: dict[str, Any]
) -> None:
    setattr(parts.half, f"_{absent}", None)
    parts.report(**reported)
    parts.half.reset()
    parts.half._tiering = None
    assert parts.peering.stop.called == (absent == "tiering")
    assert bool(parts.suspended()) == (absent == "peering")


def test_weights_that_change_end_peers_for_good_and_tiers_until_a_reset(parts: Parts) -> None:
    parts.half.reset()
    for epoch in (0, 1, 1):
        parts.report(stale=epoch)
    parts.peering.stop.assert_called_once_with(CHANGED)
    assert len(parts.suspended()) == 2, "not for the epoch before the reset"
    assert all(why.startswith(f"{CHANGED}, and its cache was not reset: ") for why in parts.suspended())
    parts.half.reset()
    assert len(parts.suspended()) == 2


def test_an_engine_whose_weights_have_changed_neither_offers_nor_reads() -> None:
    with started() as half:
        assert offers(half, "a")
        half.take_reports(StepReports(stale=0))
        assert not offers(half, "b")
        assert half._peering.source.declined(ask("c")) == SourceMiss(
            "peer", MissReason.REFUSED, detail=CHANGED
        )


def offers(half: SchedulerHalf, name: str) -> bool:
    one = ask(name, **ASKS)
    half.on_new_request(one)
    one.num_computed_tokens, one.is_complete = PROMPT, True
    return half.finished(one, ([1, 2, 3],))[0]
