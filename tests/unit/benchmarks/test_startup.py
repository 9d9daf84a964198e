"""Starts are compared within a round, and what is reported of them fits a terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.startup import report
from benchmarks.startup.engine import ReadyEngine
from benchmarks.startup.measure import Start, in_rounds
from benchmarks.startup.page import summary
from benchmarks.startup.variants import NIXL, NONE, PEERS, TIERS, VARIANTS, connector_of


def start(seconds: float, *, imports: float = 0.0, mib: int = 800, stop: float = 2.0) -> Start:
    ready = ReadyEngine(
        import_seconds=imports, engine_seconds=seconds - imports, cpu_seconds=seconds,
        rss_bytes=(mib + 50) << 20, pss_bytes=mib << 20, children=0,
    )  # fmt: skip
    return Start(ready, stop)


# The second round is twice as slow as the first, which no ratio shows.
ROUNDS = tuple(
    {
        NONE: start(2.0 * slow),
        NIXL: start(2.5 * slow, imports=0.3, mib=850),
        PEERS: start(3.0 * slow, imports=0.5, mib=900, stop=2.25),
        TIERS: start(4.0 * slow, imports=0.5, mib=2000),
    }
    for slow in (1.0, 2.0)
)


def test_every_variant_starts_once_per_round_and_no_place_in_the_order_is_its_own() -> None:
    started: list[str] = []
    found = in_rounds(3, lambda name: started.append(name) or len(started), lambda _: None)
    rounds = [started[at : at + 4] for at in range(0, 16, 4)]
    assert all(sorted(one) == sorted(VARIANTS) for one in rounds)
    assert [one[0] for one in rounds] == list(VARIANTS)
    assert len(found) == 3
    assert all(tuple(one) == VARIANTS for one in found)
    assert found[0][NIXL] == 5  # the warm-up, four starts, is not counted


@pytest.mark.parametrize(("name", "tiers"), [(PEERS, 0), (TIERS, 2)])
def test_kvferry_starts_with_and_without_tiers(tmp_path, name, tiers) -> None:
    config = connector_of(name, tmp_path).config
    assert len(config["kv_connector_extra_config"].get("tiers", ())) == tiers
    assert connector_of(NONE, tmp_path).config is None


def test_a_start_is_compared_with_those_of_its_round() -> None:
    spread = report.ratio(ROUNDS, PEERS, NONE)
    assert (spread.median, spread.low, spread.high) == (1.5, 1.5, 1.5)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    report.show(ROUNDS, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    first, second = (line.split() for line in text.splitlines() if line.startswith(PEERS))
    assert first[2:] == ["4.50", "(3.00-6.00)", "+1.50", "1.50", "(1.50-1.50)", "1.20", "(1.20-1.20)"]
    assert second[2:] == ["0.50", "4.50", "2.25", "950", "900", "+100"]


def test_the_summary_compares_each_variant_with_no_connector_and_with_the_peer() -> None:
    document = json.loads(json.dumps(report.as_json("qwen3", 256 << 20, ROUNDS)))
    found = summary(document)
    assert found.low_is_good
    assert [(one.against, one.ratio.median) for one in found.comparisons] == [
        (NONE, 1.5), (NIXL, 1.2), (NONE, 2.0), (NIXL, 1.6),
    ]  # fmt: skip
    assert (found.comparisons[0].ours, found.comparisons[0].theirs) == ("4.50 s", "3.00 s")
    assert "kvferry adds 1.50 (1.00 to 2.00) s" in found.answer
    assert "NixlConnector adds 0.75 (0.50 to 1.00) s" in found.answer
    imports, stops, memory = found.notes
    assert "0.30 s (NixlConnector) and 0.50 s (kvferry, peers)" in imports
    assert "2.25 s (kvferry, peers)" in stops
    assert "50 MiB (NixlConnector), 100 MiB (kvferry, peers), 1,200 MiB (kvferry, tiers)" in memory
