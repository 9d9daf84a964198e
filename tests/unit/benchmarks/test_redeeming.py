"""Tickets are redeemed between two processes, and what is said of that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.redeem import report as redeem_report
from benchmarks.redeem.measure import PRODUCERS, RedeemTimes, measure


def test_tickets_are_redeemed_at_producers_of_both_kinds():
    found = measure(20, 100, lambda text: None)
    assert [one.producer for one in found] == list(PRODUCERS)
    for one in found:
        assert (len(one.known), len(one.handshakes), len(one.both)) == (20, 5, 5)
        assert 0 < min(one.known) <= one.percentiles()[0] <= one.percentiles()[2]


def test_report_of_redeemed_tickets_fits_a_terminal():
    milliseconds = [ms / 1e3 for ms in (*[0.3] * 9, 4.0)]
    rest, busy = (RedeemTimes(name, tuple(milliseconds), (0.01, 0.01), (0.011, 0.013)) for name in PRODUCERS)
    assert rest.within_a_step == 0.9
    assert rest.percentiles() == pytest.approx((0.3e-3, 0.3e-3, 4e-3))
    assert rest.beside_handshake.median == pytest.approx(1.2)
    console = Console(file=io.StringIO(), width=80)
    redeem_report.show([rest, busy], 1000, console)
    said = console.file.getvalue()
    assert "median at rest under 500 µs: reached" in said
    assert max(map(len, said.splitlines())) <= 80
    assert redeem_report.as_json([rest, busy], 1000)["producers"][0]["within_a_step"] == 0.9
