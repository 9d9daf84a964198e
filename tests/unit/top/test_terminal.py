"""`kvferry top` in a terminal, against pages on real sockets."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
from functools import partial

import pytest

import kvferry.tools.top.live  # noqa: F401 - once for all forks
from kvferry.common.errors import ConfigError
from kvferry.tools.cli.top import as_plain
from kvferry.tools.top.poller import parse_address
from support.command_line import run_command_in_terminal, run_kvferry
from support.metrics_page import Page, busy, several, shown
from support.terminal import Terminal

pytestmark = pytest.mark.slow

NOBODY = "http://127.0.0.1:1"


def top(*arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> Terminal:
    command = partial(run_command_in_terminal, "top", "--interval", "0.2", *arguments)
    return Terminal(command, columns, rows, **environment)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvferry("top", "--interval", "0.1", *arguments)


@pytest.fixture
def page():
    made = Page("gemma-3-27b-it")
    busy(made)
    return made


@pytest.fixture
def engine(page):
    with shown({"/metrics": page.text}) as url:
        yield url


def row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return line.split()


def left_as_found(terminal: Terminal) -> bool:
    """The screen that was there before, a cursor, keys that are shown and need Enter."""
    shown_again = terminal.said.rindex(b"\x1b[?1049l") > terminal.said.rindex(b"\x1b[?1049h")
    cursor = terminal.said.rindex(b"\x1b[?25h") > terminal.said.rindex(b"\x1b[?25l")
    return shown_again and cursor and terminal.modes == terminal.before


def test_the_view_of_one_engine_fits_80_columns_and_24_rows(engine):
    with top(engine) as terminal:
        said = terminal.until(lambda text: "answers" in text and "127.0.0.1" in text)
        lines = terminal.lines
    assert lines[0].startswith("kvferry top  engines answering: 1 of 1, read every 0.2 s")
    assert lines[1] == "all engines: gemma-3-27b-it"
    assert "requests  5 running  1 waiting  cache 45%  first token 37.5 ms, p99 49.8 ms" in lines
    assert row(said, "peer")[3:5] == ["75%", "2"]  # of eight that looked for something; two under way
    assert row(said, "host")[:6] == ["host", "3", "GiB", "8", "GiB", "38%"]
    assert row(said, "file")[:7] == ["file", "9", "GiB", "10", "GiB", "90%", "7"]
    for words in (
        "loads failed 1", "loads expired 1", "recomputed tokens 40", "late blocks 3",
        "tiers not_stored (1 sliding_window(64)) 5", "peer looking 2",
        "read 17.5 ms, p99 24.8 ms", "descriptors of 1 MiB, 10 pages each",
        "4 held", "9 granted", "7 released", "1 expired",
        "peer 0 full_attention direct 12 MiB",
    ):  # fmt: skip
        assert words in said, words
    assert row(said, engine.removeprefix("http://"))[1:3] == ["5", "1"]


def test_connectors_are_listed_only_if_an_engine_has_several(page):
    with shown({"/metrics": page.text}) as url:
        assert "connector" not in run("--once", url).stdout
        several(page)
        said = run("--once", url).stdout
        assert row(said, "nixl")[3:] == [
            "50%",
            "3",
            "0",
            "5",
            "2",
        ]  # of all; under way, tokens, missed, failed
        assert row(said, "memory")[3:] == ["30%", "1", "0", "6", "0"]
        told = json.loads(run("--once", "--json", url).stdout)
    assert told["together"]["totals"]["connectors"]["nixl"] == {
        "queries": 10, "hits": 5, "passed_over": 0, "misses": 5, "hit_tokens": 500,
        "loads": {"failed": 2, "ready": 3},
    }  # fmt: skip


# `test_figures` proves the rates with given times.
@pytest.mark.long
def test_rates_are_of_the_last_interval(page):
    told = [page.text()]  # all of it grows at once
    with shown({"/metrics": lambda: told[-1]}) as engine, top(engine, "--interval", "1") as terminal:
        terminal.until(lambda text: "prompts 0" in text)
        busy(page)
        told.append(page.text())
        said = terminal.until(lambda text: re.search(r"prompts [^0]", text) is not None)
        found = re.search(
            r"answers (\S+)\s+prompts (\S+):\s+computed (\S+)\s+local (\S+)\s+peer (\S+)\s+host (\S+)", said
        )
        answers, prompts, computed, local, peer, host = (
            float(each.replace(",", "")) for each in found.groups()
        )
        # 50 tokens in a second, or in what a busy machine makes of it.
        assert 5 < answers < 250
        ratios = [each / answers for each in (prompts, computed, local, peer, host)]
        assert ratios == pytest.approx([30, 6, 6, 12, 4], rel=0.05)
        terminal.until(lambda text: "prompts 0" in text)


def test_the_view_follows_the_size_of_the_terminal(engine):
    with top(engine, rows=60, columns=140) as terminal:
        terminal.until(lambda text: "file: no space on the device 2" in text and "answer/s" in text)
        assert len(terminal.lines[0]) == 140
        terminal.resize(80, 24)
        # The time is at the end of the first line.
        terminal.until(lambda text: re.search(r":\d\d$", text.splitlines()[0]) is not None)
        assert len(terminal.lines[0]) == 80
        assert "answer/s" not in terminal.text
        terminal.resize(40, 8)
        terminal.until(lambda text: "requests  5 running" in text)
        terminal.resize(200, 50)
        terminal.until(lambda text: "answer/s" in text)
        terminal.press("q")
        assert terminal.end() == 0


def test_an_unreachable_engine_is_shown_beside_the_others(engine):
    with top(NOBODY, engine) as terminal:
        said = terminal.until(lambda text: "engines answering: 1 of 2" in text and "prompts" in text)
    assert re.search(
        r"^127\.0\.0\.1:1  no answer since \d\d:\d\d:\d\d \(\d+ s\): cannot connect: Connection refused$",
        said,
        re.MULTILINE,
    )
    assert row(said, engine.removeprefix("http://"))[1:3] == ["5", "1"]


# `test_figures` proves the counts of a restarted engine with given times.
@pytest.mark.long
def test_a_restarted_engine_counts_from_zero(page):
    with shown({"/metrics": page.text}) as url:
        port = int(url.rpartition(":")[2])
        terminal = top(url)
        terminal.until(lambda text: "prompts 0" in text)
    with terminal:
        terminal.until(lambda text: "engines answering: 0 of 1" in text and "no answer since" in text)
        new = Page("gemma-3-27b-it", started=2000.0)
        new.vllm("prompt_tokens_total").inc(30)
        with shown({"/metrics": new.text}, port):
            # A rate below 0, or one of all that the first engine had counted, would be of two lives.
            said = terminal.until(lambda text: re.search(r"prompts (?!0)", text) is not None)
            assert 0 < float(re.search(r"prompts (\S+)", said)[1]) <= 150
            assert "engines answering: 1 of 1" in said
            terminal.until(lambda text: "prompts 0" in text)


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_a_key_restores_the_terminal(engine, key):
    with top(engine, NOBODY) as terminal:
        terminal.until(lambda text: "engines answering: 1 of 2" in text)
        assert terminal.modes[6][termios.VSUSP] == b"\0"  # Ctrl-Z, after which the screen would stay
        terminal.press(key)
        assert terminal.end() == 0
        assert left_as_found(terminal)
        assert b"Traceback" not in terminal.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(engine, number):
    with top(engine) as terminal:
        terminal.until(lambda text: "engines answering: 1 of 1" in text)
        terminal.process.send_signal(number)
        assert terminal.end() == 0
        assert left_as_found(terminal)


def test_a_key_ends_the_view_while_an_address_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with top(url) as terminal:
            terminal.until(lambda text: "asked, has not answered yet" in text)
            terminal.press("q")
            assert terminal.end() == 0


def test_tab_selects_the_next_engine_and_escape_all_engines(engine):
    other = Page("other-model")
    other.vllm("num_requests_running").set(0)
    with shown({"/metrics": other.text}) as second, top(engine, second) as terminal:
        terminal.until(lambda text: "2 of 2" in text and "all engines: gemma-3-27b-it, other-model" in text)
        terminal.press("\t")
        terminal.until(lambda text: f"{engine.removeprefix('http://')}, gemma-3-27b-it" in text)
        terminal.press("\t")
        terminal.until(
            lambda text: f"{second.removeprefix('http://')}, other-model" in text and "misses    none" in text
        )
        terminal.press("\t")
        terminal.until(lambda text: "all engines" in text)
        terminal.press("\t\x1b")
        terminal.until(lambda text: "all engines" in text)


def test_engines_without_room_are_counted(engine):
    with top(engine, *(f"http://127.0.0.{n}:1" for n in range(2, 22))) as terminal:
        said = terminal.until(lambda text: re.search(r"^and \d+ more$", text, re.MULTILINE) is not None)
        listed = len(re.findall(r"^127\.0\.0\.", said, re.MULTILINE))
        assert f"and {21 - listed} more" in said
        assert listed >= 3
        terminal.resize(80, 60)
        terminal.until(lambda text: "127.0.0.21:1 " in text and "more" not in text)


def test_the_engines_of_a_router_are_shown_in_its_place(page):
    with shown({"/metrics": page.text}) as decode:
        both = {"url": "http://127.0.0.2:1", "up": False}
        health = {
            "prefill": [{"url": NOBODY, "up": False}, both],
            "decode": [{"url": decode, "up": True}, both],
        }
        pages = {"/health": json.dumps(health), "/metrics": "kvferry_router_active_requests 0.0\n"}
        with shown(pages) as router, top(router) as terminal:
            said = terminal.until(lambda text: "engines answering: 1 of 3" in text and "prompts" in text)
    assert "127.0.0.2:1 both  no answer since" in said
    assert "127.0.0.1:1 prefill  no answer since" in said
    assert f"{decode.removeprefix('http://')} decode" in said
    assert router.removeprefix("http://") not in said


def test_the_view_has_no_colours_if_no_color_is_set(engine):
    with top(engine, NOBODY, NO_COLOR="1") as terminal:
        terminal.until(lambda text: "engines answering: 1 of 2" in text and "no answer since" in text)
        assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.said)


def test_one_sample_is_printed_without_a_terminal(engine):
    done = run(engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "prompts 0" in done.stdout
    assert "dropped   file: no space on the device 2" in done.stdout
    assert "declined  file: too few uses 8" in done.stdout


def test_once_prints_one_sample_in_a_terminal(engine):
    with top(engine, "--once") as terminal:
        assert terminal.end() == 0
        assert b"\x1b[?1049h" not in terminal.said
        assert "leases    4 held" in terminal.text


def test_json_has_the_same_numbers(engine):
    done = run(engine, NOBODY, "--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    first, second = said["engines"]
    assert (first["model"], first["figures"]["levels"]["running"]) == ("gemma-3-27b-it", 5)
    assert said["together"]["totals"]["sources"]["peer"]["hit_rate"] == 0.75
    assert said["together"]["rates"]["prompt_tokens"] == 0
    assert (second["figures"], second["silence"]["why"]) == (
        None,
        "cannot connect: Connection refused",
    )


def test_json_has_null_for_infinity_and_nan():
    assert as_plain({"a": [float("nan"), 1.5], "b": {"c": float("inf")}}) == {
        "a": [None, 1.5],
        "b": {"c": None},
    }


def test_ctrl_c_during_a_sample_sets_the_exit_code(page):
    asked = threading.Event()
    with shown({"/metrics": lambda: asked.set() or page.text()}) as engine:
        main = "from kvferry.tools.cli.main import main; main()"
        command = [sys.executable, "-c", main, "top", engine, "--json", "--interval", "60"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert "Traceback" not in process.stderr.read()


def test_an_invalid_url_is_refused_in_one_sentence():
    done = run("localhost")
    assert done.returncode == 2
    said = "kvferry: 'localhost' is no URL of an engine or a router; give one such as http://127.0.0.1:8000\n"
    assert done.stderr == said


@pytest.mark.parametrize("url", ["", "http://", "http://a:99999", "ftp://a:1", "/metrics"])
def test_an_address_without_scheme_host_or_valid_port_is_refused(url):
    with pytest.raises(ConfigError, match="is no URL of an engine or a router"):
        parse_address(url)


@pytest.mark.parametrize("more", ["", "/", "/metrics", "/metrics/"])
def test_an_address_may_end_in_metrics(more):
    assert parse_address(f"http://a:1{more}") == "http://a:1"


def test_an_address_without_engine_metrics_is_reported_and_sets_the_exit_code():
    with (
        shown({}) as nothing,
        shown({"/metrics": "<html>"}) as page,
        shown({"/metrics": f"{RUNNING}{{x= 3"}) as broken,
    ):
        done = run(nothing, page, broken)
    assert (done.returncode, done.stderr) == (1, "")
    said = " ".join(done.stdout.split())
    assert re.search(r"no answer since \d\d:\d\d:\d\d \(0 s\): /metrics answers with status 404 ", said)
    assert "/metrics has nothing of vllm: or kvferry_" in said
    assert "/metrics is not in the format of Prometheus" in said


RUNNING = "vllm:num_requests_running"
