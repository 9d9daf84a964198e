"""What engines that read each other's host memory keep together, and what a read takes."""

from __future__ import annotations

import json

import pytest

from kvferry.common.errors import ConfigError
from kvferry.planning import Costs
from kvferry.tools.models import read_model
from kvferry.tools.plan.fleet import DIRECTORY_BYTES, FleetForecast, forecast_fleet
from kvferry.tools.plan.forecast import limit_bandwidth
from kvferry.tools.plan.kept import KeptSettings, TierForecast, forecast_tiers
from kvferry.tools.plan.side import EngineSide
from unit.plan.test_command import printed, run
from unit.plan.test_kept import DENSE, HYBRID, PAGE, WINDOWED

CHUNK_BYTES = 4 * 65536
"""Of 256 tokens of DENSE."""


def fleet(config, memory="1GiB", engines=3, costs=Costs(), **asked) -> FleetForecast:  # noqa: B008 - frozen
    kept = forecast_tiers(read_model(config), EngineSide(), KeptSettings(**asked))
    found = forecast_fleet(kept, engines, memory, costs)
    assert found is not None
    return found


def test_engines_keep_together_what_each_keeps():
    found = fleet(DENSE, f"{40 * (CHUNK_BYTES + PAGE)}B", prompt=1024)
    assert (found.tokens, found.chunks) == (40 * 256, 3 * 40)
    assert found.directory_bytes == 120 * DIRECTORY_BYTES


def test_read_brings_all_chunks_of_full_attention_and_of_a_window_the_last_ones():
    assert [(read.tokens, read.bytes) for read in fleet(DENSE).reads] == [
        (1024 * times, 4 * times * CHUNK_BYTES) for times in (1, 8, 32, 128)
    ]
    # One layer of full attention, and five of a window that is shorter than a chunk.
    assert [read.bytes for read in fleet(WINDOWED).reads] == [
        (4 * times + 5) * 256 * 256 for times in (1, 8, 32, 128)
    ]


def test_read_brings_one_snapshot():
    kept = forecast_tiers(read_model(HYBRID), EngineSide(), KeptSettings())
    attention, state = sorted(
        (one.group for one in kept.groups), key=lambda group: group.kind.value == "state"
    )
    for read in fleet(HYBRID).reads:
        chunks = read.tokens // kept.chunk_tokens
        assert read.bytes == chunks * attention.chunk_bytes + state.chunk_bytes


def test_read_takes_the_time_of_its_bytes_and_of_a_question_for_each_chunk():
    slow = limit_bandwidth(Costs(), 0.1)
    first, *_, last = fleet(DENSE, costs=slow).reads
    assert last.seconds == pytest.approx(128 * first.seconds)
    assert first.seconds > 4 * CHUNK_BYTES / 0.1e9 + 4 * slow.ask_seconds
    assert first.seconds < 1.1 * (4 * CHUNK_BYTES / 0.1e9 + 4 * slow.ask_seconds)
    assert first.tokens_per_second == pytest.approx(1024 / first.seconds)
    assert fleet(DENSE).reads[0].seconds < first.seconds


def test_model_that_cannot_be_kept_has_no_fleet():
    assert forecast_fleet(TierForecast(prompt=1024, why_not="rings"), 3, "1GiB", Costs()) is None


def test_command_shows_a_fleet_if_asked_for(capsys, tmp_path):
    shown = printed(capsys, "Llama-3.1-8B", "--engines", "16")
    assert "Fleet: 16 engines with 64 GiB of host memory each" in shown
    run("Llama-3.1-8B", "--engines", "16", "--html", str(tmp_path / "page.html"))
    assert "Fleet: 16 engines" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    said = json.loads(printed(capsys, "Llama-3.1-8B", "--engines", "16", "--json"))["fleet"]
    assert said.keys() == {"engines", "host_bytes", "tokens", "chunks", "directory_bytes", "reads"}
    assert said["reads"][0].keys() == {"tokens", "bytes", "seconds"}
    assert said["host_bytes"] == 64 << 30
    assert json.loads(printed(capsys, "Llama-3.1-8B", "--json"))["fleet"] is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--engines", "1"), "--engines is 1; a fleet has at least 2"),
        (("--host-memory", "1GiB"), "--host-memory is for a fleet; add --engines COUNT"),
        (("--engines", "2", "--host-memory", "much"), "much"),
    ],
)
def test_settings_that_make_no_fleet_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        run("Llama-3.1-8B", *given)
