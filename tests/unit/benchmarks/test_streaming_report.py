"""The report of `benchmarks streaming`, and machines on which it cannot run."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import hosts
from benchmarks.streaming import report
from benchmarks.streaming.measure import FirstToken
from kvferry.common.errors import ConfigError


def requests(gigabits: float = 1.0, tokens: int = 16_384) -> list[FirstToken]:
    """Three pairs of requests, of which the streamed ones take 0.5, 0.8 and 0.6 of the time."""
    each = ((False, 2.0, 1.5), (True, 1.0, 0.9), (False, 1.0, 0.5), (True, 0.8, 0.7))
    last = ((False, 4.0, 3.0), (True, 2.4, 2.3))
    return [FirstToken(streamed, gigabits, tokens, *times) for streamed, *times in (*each, *last)]


def test_ratios_are_taken_within_a_round() -> None:
    assert report.ratio(requests(), 1.0, 16_384) == pytest.approx(0.6)


def test_the_table_fits_a_terminal() -> None:
    console = Console(file=(out := io.StringIO()), width=80, highlight=False)
    report.show(requests() + requests(0.0, 2048), console)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[-2].split()) == "1 Gbit/s 16,384 64 MiB 2.0 s 1.0 s 0.60 500 ms 100 ms"
    assert lines[-1].startswith("no limit")


def test_json_has_every_request() -> None:
    found = report.as_json(requests())
    assert [round(one["left_seconds"], 3) for one in found["requests"]] == [0.5, 0.1, 0.5, 0.1, 1.0, 0.1]


def test_machine_without_network_namespaces_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Operation not permitted; run as root"), hosts.linked_hosts():
        pass


def devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root")
def test_thread_and_what_it_starts_on_a_host_see_only_the_devices_of_the_host() -> None:
    before = devices()

    def work(there: hosts.LinkedHost, here: hosts.LinkedHost) -> list[set[str]]:
        there.enter()
        listed = ["ls", "/sys/class/net"]
        started = set(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split())
        here.enter()
        return [started, devices()]

    there, here = hosts.on_linked_hosts(work)
    assert {name for name in there if name.startswith("kvb")} == {"kvb1"}
    assert {name for name in here if name.startswith("kvb")} == {"kvb2"}
    assert devices() == before
    with pytest.raises(ZeroDivisionError):
        hosts.on_linked_hosts(lambda *_: 1 // 0)
