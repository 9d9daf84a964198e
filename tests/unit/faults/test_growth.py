"""Growth is seen, and what stays flat is not taken for growth."""

from __future__ import annotations

import os
from pathlib import Path

from faults.growth import MOST_PER_HOUR, Sample, problems, sample, slopes, table

FLAT = [Sample(60.0 * n, 1000.0 + n % 2, 500.0, 200, 80, 10.0) for n in range(12)]


def test_what_stays_flat_is_no_problem():
    assert not problems(FLAT)


def test_everything_that_grows_is_a_problem():
    steps = {name: most / 50 for name, most in MOST_PER_HOUR.items()}
    grown = [
        Sample(one.at, *(getattr(one, name) + step * n for name, step in steps.items()))
        for n, one in enumerate(FLAT)
    ]
    assert {line.split()[0] for line in problems(grown)} == set(MOST_PER_HOUR)


def test_what_grew_only_while_caches_filled_is_no_problem():
    warm = [Sample(one.at, 500.0, 500.0, 200, 80, 10.0) if n < 4 else one for n, one in enumerate(FLAT)]
    assert not problems(warm)
    assert slopes(warm)["descriptors"] == 0


def test_a_process_is_looked_at_with_all_that_it_holds(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(bytes(2048))
    found = sample(1.0, [os.getpid()], [log])
    assert 10 < found.pss_mib <= found.rss_mib + 1
    assert found.descriptors > 2
    assert found.threads >= 1
    assert found.log_kib == 2
    assert table([found, Sample(2.0, 1, 1, 1, 1, 1), Sample(3.0, 1, 1, 1, 1, 1)]).count("\n") == 6
