"""What is reported of tiers follows from what was measured, and fits a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.bench import offload_report, tier_hooks
from kvferry.bench.asking import Asking, Asks, Times
from kvferry.bench.contest import Contest, Speed, run
from kvferry.bench.engines import read_geometry
from kvferry.bench.first_token import FirstToken
from kvferry.bench.lookup import Looks, LookUp
from kvferry.bench.offload import Job, Measured
from kvferry.bench.rounds import Series
from kvferry.bench.stats import Spread
from kvferry.bench.tier_hooks import HookClock, HookCost, StepTimes
from kvferry.bench.transfer import Machine
from kvferry.plan.side import Side
from support.clock import Clock

SIZE = 512 << 20


def speed(ours: float, depth: int = 1, target: float = 0.8, tier: str = "host, LBNHC") -> Speed:
    """Beside limits that take 0.1 and 0.2 seconds."""
    slow, fast = (Series(name, SIZE, (s,) * 3) for name, s in (("threads, O_DIRECT", 0.2), ("fio", 0.1)))
    aside = Series("memcpy in runs of 8 KiB", SIZE, (0.16,) * 3)
    return Speed(tier, "store", depth, target, Series("kvferry", SIZE, (ours,) * 3), (slow, fast), (aside,))


HOOKS = HookCost(
    16,
    520,
    StepTimes((2e-3, 1e-3), (0.2, 0.2)),
    StepTimes((1e-4, 2e-4, 3e-4), (0.01, 0.01, 0.06)),
    Spread(3e-5, 2e-5, 1e-4),
    {"get_kv_connector_stats": 8.1e-5, "build_connector_meta": 6.1e-5, "start_load_kv": 1e-6, "other": 1e-7},
)
FIRST = FirstToken(16_384, 128 << 20, (50.0, 40.0, 60.0), {"host": (0.5, 0.4, 0.5), "file": (1.0, 1.0, 1.0)})


def asks(place: str, first_us: float) -> Asks:
    """Of a hybrid under the policy whose names are longest."""
    times = Times(first_us / 1e6, 1.162e-3)
    shares = (316e-6, 712e-6, 135e-6, 189e-6)
    return Asks("attention", "weight", place, Times(4e-3, 5e-3), times, Times(4e-4, 9e-4), shares)


def measured(*speeds: Speed, look_ms: float = 1.0, ask_us: float = 900) -> Measured:
    wide = Spread(look_ms / 1e3, 0.9e-3, 1162e-3)
    looks = tuple(Looks(place, 131_072, wide, wide) for place in ("host", "file", "nowhere"))
    return Measured(
        Job(
            read_geometry("Llama-3.1-8B"),
            ("tiers", "lookup"),
            (Side(layout="LBNHC"),),
            (1, 8),
            7,
            Path("/tmp"),
        ),
        Machine(128, "Some Long-named Processor 9654P 96-Core @ 3.70GHz", None),
        256,
        16 << 20,
        speeds,
        LookUp(131_072, 512, 1_000_000, 64_292, wide, looks),
        Asking(131_072, 512, (15_339,) * 4, 70, (asks("all five", 700), asks("each a part", ask_us))),
        HOOKS,
        FIRST,
    )


def shown(of: Measured) -> str:
    out = io.StringIO()
    offload_report.show(of, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_it_fits_80_columns_and_cuts_nothing_off() -> None:
    text = shown(measured(speed(0.1), speed(0.004, 256)))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_the_limit_is_the_fastest_by_the_median() -> None:
    assert speed(0.2).limit.name == "fio"
    assert speed(0.2).ratio == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("seconds", "target", "reached"), [(0.12, 0.8, True), (0.13, 0.8, False), (0.14, 0.7, True)]
)
def test_the_target_is_a_share_of_the_limit(seconds: float, target: float, reached: bool) -> None:
    assert speed(seconds, target=target).reached is reached


def test_what_explains_a_result_and_what_depth_brings_are_said() -> None:
    text = " ".join(shown(measured(speed(0.2), speed(0.1, 8))).split())
    assert "host, LBNHC store 8: 2.00x memcpy in runs of 8 KiB: 0.62" in text


@pytest.mark.parametrize(("look_ms", "says"), [(2.9, "reached"), (3.1, "missed")])
def test_a_look_has_three_milliseconds(look_ms: float, says: str) -> None:
    assert f"target under 3 ms: {says}" in shown(measured(look_ms=look_ms))


@pytest.mark.parametrize(("ask_us", "says"), [(990, "reached"), (1010, "missed")])
def test_no_step_waits_a_millisecond_for_five_sources(ask_us: float, says: str) -> None:
    text = " ".join(shown(measured(ask_us=ask_us)).split())
    assert f"target under 1 ms: {says} the longest first, attention, weight, each a part: finding" in text


def test_the_share_of_hooks_is_the_median_over_steps_of_their_share() -> None:
    assert HOOKS.decoding.share.median == pytest.approx(0.01)
    assert HOOKS.decoding.p99 == 3e-4
    assert not HOOKS.reached
    text = " ".join(shown(measured()).split())
    assert "decode 3 200 µs 300 µs 300 µs 10 ms 1.00%" in text
    assert "target under 1% of a decoding step of this engine's model: missed" in text
    assert "get_kv_connector_stats 81 µs, build_connector_meta 61 µs, start_load_kv 1 µs;" in text


def test_a_first_token_is_compared_with_computing_it_in_the_same_round() -> None:
    assert FIRST.times("host") == Spread(100.0, 100.0, 120.0)
    text = " ".join(shown(measured()).split())
    assert "in files 1.0 s (1.0 s-1.0 s) 50.0x (40.0-60.0)" in text


class Connector:
    """Of an engine, with one hook that calls another."""

    def __init__(self, time: Clock) -> None:
        self._time = time

    def outer(self) -> str:
        self._time.now += 2
        return self.inner()

    def inner(self) -> str:
        self._time.now += 1
        return "done"


def test_what_one_hook_calls_of_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr(tier_hooks.time, "perf_counter", time)
    connector = Connector(time)
    own = dict(vars(connector))
    clock = HookClock([connector])
    assert connector.outer() == "done"
    assert clock.take() == {"outer": 3.0}
    connector.inner()
    assert clock.take() == {"inner": 1.0}
    clock.remove()
    connector.outer()
    assert not clock.take()
    assert vars(connector) == own


def test_json_has_the_rounds_and_what_follows_from_them() -> None:
    loaded = json.loads(json.dumps(offload_report.as_json(measured(speed(0.2)))))
    (one,) = loaded["speeds"]
    assert one["ours"]["seconds"] == [0.2] * 3
    assert (one["limit"], one["ratio"]["median"], one["reached"]) == ("fio", 0.5, False)
    assert loaded["lookup"]["reached"] is True
    assert loaded["hooks"]["share"]["decoding"]["median"] == pytest.approx(0.01)
    assert loaded["first_token"]["as_fast"]["file"]["median"] == 50.0


class Counted:
    """Takes as long as it is told, and counts how often it was asked."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.bytes, self.seconds, self.moves = name, 10, seconds, 0

    def move(self) -> float:
        self.moves += 1
        return self.seconds


def test_every_round_runs_all_movers_and_each_keeps_its_own_times() -> None:
    movers = [Counted(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0))]
    a, b, c, d = movers
    first, second = run(
        [Contest("host", "store", 1, 0.8, a, (b,), (c,)), Contest("host", "load", 1, 0.8, d, (a,))],
        7,
        lambda _: None,
    )
    assert (first.ours.seconds, first.limit.seconds, first.asides[0].seconds) == (
        (1.0,) * 7,
        (2.0,) * 7,
        (3.0,) * 7,
    )
    assert (second.ours.seconds, second.limit.name) == ((4.0,) * 7, "a")
    assert [mover.moves for mover in movers] == [16, 8, 8, 8]
