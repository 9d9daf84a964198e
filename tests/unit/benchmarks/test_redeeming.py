"""Tickets are redeemed between two processes, and what is said of that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.redeem import measure as measurement, report as redeem_report, tables
from benchmarks.redeem.measure import (
    LENGTHS,
    PRODUCERS,
    RedeemTimes,
    SealSize,
    measure,
    measure_seals,
)
from benchmarks.redeem.tables import FAMILIES


def test_tickets_are_redeemed_at_producers_of_both_kinds():
    found = measure(20, 100, lambda text: None)
    assert [one.producer for one in found] == list(PRODUCERS)
    for one in found:
        assert (len(one.known), len(one.sealed), len(one.handshakes), len(one.both)) == (20, 20, 5, 5)
        assert 0 < min(one.known) <= one.percentiles()[0] <= one.percentiles()[2]


def test_seals_are_longer_the_longer_their_prompts_are_until_there_are_none(monkeypatch):
    monkeypatch.setattr(tables, "_BATCHES", 60)
    monkeypatch.setattr(measurement, "_POOLS", 1)
    sizes = {(one.family, one.tokens): one.characters for one in measure_seals()}
    assert sizes.keys() == {(family, tokens) for family in FAMILIES for tokens in LENGTHS}
    for family in FAMILIES:
        assert 0 < sizes[family, 512] < sizes[family, 8192] <= 4096
    assert sizes["Gemma 3", 131_072] == 0


def test_a_used_pool_gives_each_block_to_one_table_and_none_but_windows_lack_any():
    family = tables.FamilyTables(1, sliding=2, window_tokens=256, state=1)
    full, *windows, state = tables.UsedPool(family, 1).tables(5000)
    assert (len(full), len(state)) == (-(-5000 // 16), 1)
    blocks = [block for table in (full, *windows, state) for block in table if block]
    assert len({*blocks}) == len(blocks)
    assert 0 not in full
    for window in windows:
        assert len(window) == len(full)
        assert 0 not in window[-16:]
        assert window.count(0) > 100


def test_report_of_redeemed_tickets_fits_a_terminal():
    milliseconds = [ms / 1e3 for ms in (*[0.3] * 9, 4.0)]
    rest, busy = (
        RedeemTimes(name, tuple(milliseconds), (1e-4,), (0.01, 0.01), (0.011, 0.013)) for name in PRODUCERS
    )
    assert rest.within_a_step == 0.9
    assert rest.percentiles() == pytest.approx((0.3e-3, 0.3e-3, 4e-3))
    assert rest.beside_handshake.median == pytest.approx(1.2)
    console = Console(file=io.StringIO(), width=80)
    redeem_report.show([rest, busy], 1000, console)
    sizes = [SealSize(name, tokens, 4096, 0.8e-3, 0.1e-3) for tokens in LENGTHS for name in FAMILIES]
    redeem_report.show_seals(sizes, console)
    said = console.file.getvalue()
    assert "median at rest under 500 µs: reached" in said
    assert max(map(len, said.splitlines())) <= 80
    assert redeem_report.as_json([rest, busy], sizes, 1000)["producers"][0]["within_a_step"] == 0.9
