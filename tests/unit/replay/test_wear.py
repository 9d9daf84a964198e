"""What a replay writes to disks, with and without an admission filter."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from kvferry.common.errors import ConfigError
from kvferry.tools.replay.settings import AdmissionSetting, parse_tier
from kvferry.tools.replay.show import Outcome, as_json, show
from kvferry.tools.replay.wear import Endurance, wear_of
from kvferry.tools.report import Report
from support.small_replays import prompt, simulation

DAY = 86_400.0
TIERS = ("host=1B", "file=1TiB")


def replayed(*requests, tiers=("host=unlimited", "file=1TiB"), **settings):
    made = simulation(*tiers, **settings)
    made.run(requests)
    return made


def chunk_bytes(made):
    (size,) = made.tiers[1][0].chunk_bytes
    return size


def written(made):
    (counts,) = made.tiers[1][0].counts
    return counts.stored


def once(at=0.0):
    return prompt(1024, 1, 2, at=at)


def test_each_chunk_is_written_with_its_second_use():
    admission = AdmissionSetting(min_uses=2)
    per_prompt = written(replayed(once()))
    assert per_prompt == 4
    assert written(replayed(once(), admission=admission)) == 0
    assert written(replayed(once(), once(), admission=admission)) == per_prompt
    other = prompt(1024, 1, 3)
    assert written(replayed(once(), other, admission=admission)) == per_prompt // 2, "what both begin with"


def test_a_declined_chunk_costs_the_hit_of_its_second_use_only():
    """Host memory is too small to keep what the prompts between bring."""
    requests = [once(), *(prompt(1024, n, n) for n in range(10, 40))]
    again = [*requests, *requests, *requests]
    size = chunk_bytes(simulation("host=unlimited", "file=1TiB"))
    tiers = (f"host={6 * size}B", "file=1TiB")
    everything = replayed(*again, tiers=tiers)
    second = replayed(*again, tiers=tiers, admission=AdmissionSetting(min_uses=2))
    assert everything.results.hit_rate == pytest.approx(2 / 3, abs=0.01)
    assert second.results.hit_rate == pytest.approx(1 / 3, abs=0.01)
    assert written(everything) == written(second)


def test_short_prompts_are_not_written():
    admission = AdmissionSetting(min_prompt_tokens=1024)
    assert written(replayed(prompt(1023, 1, 2), admission=admission)) == 0
    assert written(replayed(once(), admission=admission)) == 4


def test_no_more_is_written_than_the_budget_of_a_day():
    size = chunk_bytes(simulation(*TIERS))
    requests = [prompt(1024, n, n, at=n * DAY / 100) for n in range(100)]
    free = replayed(*requests, admission=AdmissionSetting())
    tight = replayed(*requests, admission=AdmissionSetting(write_per_day=40 * size))
    assert written(free) == 400
    assert 30 <= written(tight) <= 41
    (counts,) = tight.tiers[1][0].counts
    assert counts.declined == 400 - written(tight)


def test_a_short_budget_goes_to_what_is_used_often():
    size = chunk_bytes(simulation(*TIERS))
    often = prompt(1024, 7777, 7777)
    requests = []
    for n in range(200):
        requests.append(prompt(1024, n, n, at=n * DAY / 200))
        if n % 5 == 0:
            requests.append(prompt(1024, 7777, 7777, at=n * DAY / 200))
    made = simulation("host=unlimited", "file=1TiB", admission=AdmissionSetting(write_per_day=24 * size))
    # Until its second use, other chunks take all of the budget.
    made.run(requests)
    held = made.tiers[1][0].held
    seen = simulation("host=unlimited", "file=1TiB")
    seen.run([often])
    assert all(key in held for key in seen.tiers[1][0].held)


def test_a_disk_lasts_as_long_as_its_endurance():
    made = replayed(once(), prompt(1024, 5, 6, at=DAY))
    size = 8 * chunk_bytes(made)
    (row,) = wear_of(made.replayed(), Endurance(total_bytes=size * 365 * 3))
    assert row.written_per_day == size
    assert row.years == pytest.approx(3)
    (row,) = wear_of(made.replayed(), Endurance(writes_per_day=size / (1 << 40)))
    assert row.years == pytest.approx(5)
    assert wear_of(made.replayed(), Endurance())[0].years is None


def test_an_object_store_has_no_endurance_and_host_memory_does_not_wear():
    made = replayed(once(), once(DAY), tiers=("host=unlimited", "object=unlimited"))
    (row,) = wear_of(made.replayed(), Endurance(total_bytes=1))
    assert (row.name, row.years) == ("object", None)


def test_full_writes_of_a_disk_without_a_size_are_refused():
    with pytest.raises(ConfigError, match="--tier file=unlimited has no size"):
        Endurance(writes_per_day=1).bytes_of(parse_tier("file=unlimited"))


def test_both_replays_are_shown_side_by_side():
    everything = replayed(once(), once(DAY), tiers=TIERS)
    second = replayed(once(), once(DAY), tiers=TIERS, admission=AdmissionSetting(min_uses=2))
    endurance = Endurance(total_bytes=1 << 40)
    rows = tuple(wear_of(everything.replayed(), endurance) + wear_of(second.replayed(), endurance))
    found = Outcome(second.replayed(), "trace", complete=True, wear=rows)
    text = StringIO()
    show(found, Report(Console(file=text, width=100), 100))
    lines = [line.split() for line in text.getvalue().splitlines() if line.startswith("file ")]
    assert [line[1] for line in lines[-2:]] == ["all", "admitted"]
    assert [row["admits_all"] for row in as_json(found)["wear"]] == [True, False]
