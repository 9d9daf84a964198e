"""Positions at which requests leave snapshots, and the log lines about them at the start."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.config import parse_config
from kvferry.connector.engine import CacheGroup, PlainRequest, PlainStep
from kvferry.connector.events import EventStream, SnapshotsPlaced
from kvferry.connector.tiers.milestones import SnapshotPlaces, snapshot_rule
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import canonical_form_of
from kvferry.tools.models.layout import EngineShape, lay_out
from kvferry.tools.models.store import LayerCache
from support.engine_info import made_up
from support.models import attention, model, state

BLOCK = 16


def request(tokens: int = 200, name: str = "r") -> PlainRequest:
    return PlainRequest(request_id=name, prompt_token_ids=list(range(tokens)))


def run(places: SnapshotPlaces, one: PlainRequest, *steps: int) -> list[int]:
    """Schedule steps that end at these positions; the request's position before each of them."""
    seen = []
    for number, end in enumerate(steps):
        seen.append(one.snapshot_at)
        schedule(places, one, end, started=not number)
    return seen


def schedule(places: SnapshotPlaces, one: PlainRequest, end: int, *, started: bool = False) -> None:
    step = PlainStep(tokens={one.request_id: end - one.num_computed_tokens})
    places.count(step)
    places.schedule(step, [one.request_id] if started else [])
    one.num_computed_tokens = end


def test_a_request_has_one_position_at_a_time_and_then_the_next() -> None:
    places, one = SnapshotPlaces(32, BLOCK), request()
    places.admit(one, 0, 0)
    assert run(places, one, 16, 32, 64, 128, 192) == [32, 32, 64, 128, 128]


def test_positions_that_a_step_has_passed_are_left_out() -> None:
    places, one = SnapshotPlaces(32, BLOCK), request()
    places.admit(one, 0, 0)
    assert run(places, one, 80, 192) == [32, 128]


def test_a_snapshot_is_placed_at_the_end_of_shared_attention_chunks() -> None:
    places, near, far = SnapshotPlaces(32, BLOCK), request(), request()
    places.admit(far, 64, 110)
    assert far.snapshot_at == 96, "at the end of a block"
    places.admit(near, 80, 110)
    assert near.snapshot_at == 128


def test_the_engines_own_position_is_kept_among_the_others() -> None:
    places, one = SnapshotPlaces(32, BLOCK), request()
    one.snapshot_at = 48
    places.admit(one, 0, 0)
    assert run(places, one, 32, 48, 64) == [32, 48, 64]


def test_a_position_that_the_engine_sets_after_it_has_asked_is_kept_as_well() -> None:
    places, one = SnapshotPlaces(32, BLOCK), request()
    places.admit(one, 96, 0)
    one.snapshot_at = 96  # instead of 128; it has no state there, and begins at 0
    assert run(places, one, 80, 96, 128) == [96, 96, 128]


def test_a_request_that_is_admitted_again_begins_anew_and_one_that_ended_is_forgotten() -> None:
    places, one, other = SnapshotPlaces(32, BLOCK), request(), request(name="other")
    places.admit(one, 0, 0)
    places.admit(other, 0, 0)
    run(places, one, 128)
    one.num_computed_tokens = one.snapshot_at = 0
    places.admit(one, 0, 0)
    assert run(places, one, 32, 64) == [32, 64]
    places.forget("r")
    one.num_computed_tokens = one.snapshot_at = 0
    assert run(places, one, 32, 64) == [0, 0]
    assert run(places, other, 32) == [32]


def test_no_snapshot_is_placed_without_the_setting_or_in_a_short_prompt() -> None:
    for places, one in ((SnapshotPlaces(0, BLOCK), request()), (SnapshotPlaces(32, BLOCK), request(32))):
        places.admit(one, 0, 96)
        assert (one.snapshot_at, run(places, one, 32, 64)) == (0, [0, 0])


def rule(*stores: LayerCache, **settings: int) -> Any:
    shape = EngineShape(1, (len(stores),), BLOCK, "LBNHC", 8)
    ranks = lay_out(model(*stores), shape)
    groups = (CacheGroup(kind=group.kind, attention_span=0, block_tokens=BLOCK) for group in ranks[0].groups)
    facts = made_up(groups=tuple(groups), longest_request=10_000)
    canonical = canonical_form_of(ranks, BLOCK)
    config = parse_config({"tiers": "default", **settings})
    return snapshot_rule(config.first_snapshot_tokens, facts, canonical, BLOCK)


SNAPSHOT = LayerCache(GroupKind.STATE, 0, state().fields[1:])


def test_the_engine_says_at_its_start_which_snapshots_it_keeps_and_what_they_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found, events = rule(attention(), SNAPSHOT), EventStream(seen := Listener())
    found.announce(events)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "snapshots of recurrent state at 1,024 tokens, at its doubles, and where" in line.message
    assert "up to 4 more snapshots of 4 KiB for a prompt of 10,000 tokens (16 KiB)" in line.message
    assert seen.events == [SnapshotsPlaced(1024, 4096)]


def test_the_engine_warns_at_its_start_if_it_keeps_none(caplog: pytest.LogCaptureFixture) -> None:
    found, events = rule(attention(), SNAPSHOT, first_snapshot_tokens=0), EventStream(seen := Listener())
    found.announce(events)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "first_snapshot_tokens is 0, so a prompt that shares only its beginning" in line.message
    assert "leave the setting out to keep snapshots at 1,024 tokens" in line.message
    assert "4 more snapshots of 4 KiB for a prompt of 10,000 tokens (16 KiB)" in line.message
    assert seen.events == [SnapshotsPlaced(0, 4096)]


def test_no_warning_is_logged_without_recurrent_state(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rule(attention(), first_snapshot_tokens=0).announce(EventStream(seen := Listener()))
    assert (caplog.records, seen.events) == ([], [])


@pytest.mark.parametrize("settings", [{}, {"first_snapshot_tokens": 0}])
def test_no_warning_is_logged_if_prompts_are_too_short_for_snapshots(
    caplog: pytest.LogCaptureFixture, settings: dict[str, int]
) -> None:
    caplog.set_level(logging.INFO)
    found = replace(rule(attention(), SNAPSHOT, **settings), longest=1024)
    found.announce(EventStream(seen := Listener()))
    assert (caplog.records, len(seen.events)) == ([], 1)


class Listener:
    def __init__(self) -> None:
        self.events: list[object] = []

    def __call__(self, event: object) -> None:
        self.events.append(event)
