import json
from datetime import UTC, datetime

import pytest

from kvferry.common.errors import TransferError
from kvferry.connector.config import parse_config
from kvferry.planning.strategy import Costs
from kvferry.tools.doctor import costs, nixl, reads
from kvferry.tools.doctor.engines import Target
from kvferry.tools.doctor.examine import names_other_machines
from kvferry.tools.doctor.finding import Finding, ProcessResult, State
from kvferry.tools.doctor.reads import calibrate
from kvferry.transport.costs import default_costs_path, load_costs, write_costs
from support.bench_results import calibration

MARK = "kvferry doctor: "
# As UCX 1.20 printed it here.
UCX = """\
[1795309897.55] [vm:5712 :0]   +--------+-------------+-------------------------------------------+
[1795309897.55] [vm:5712 :0]   | bench-raw/1 intra-node cfg#1                                     |
[1795309897.55] [vm:5712 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1795309897.55] [vm:5712 :0]   +--------+-------------+-------------------------------------------+
[1795309897.55] [vm:5712 :0]   | Range  | Description |                  Config                   |
[1795309897.55] [vm:5712 :0]   +--------+-------------+-------------------------------------------+
[1795309897.55] [vm:5712 :0]   | 0..inf | zero-copy   | WAY                                |
[1795309897.55] [vm:5712 :0]   +--------+-------------+-------------------------------------------+
[1795309897.55] [vm:5712 :3]   +-------------+--------------------+---------------------+
[1795309897.55] [vm:5712 :3]   | active message by ucp_am_send*(multi) from host memory |
[1795309897.55] [vm:5712 :3]   +-------------+--------------------+---------------------+
[1795309897.55] [vm:5712 :3]   |    Range    |    Description     |       Config        |
[1795309897.55] [vm:5712 :3]   |     0..8184 | short              | tcp/eth7            |
"""
SMALL, LARGE = (2048, 2048 << 12, 5e-3), (16, 32 << 20, 3e-3)


def told(*lines: dict, err: str = "", code: int | None = 0, ucx: str = "") -> ProcessResult:
    return ProcessResult(code, ucx + "\n".join(f"{MARK}{json.dumps(line)}" for line in lines), err)


def read(transports: str = "cma/memory", strategy: str = "direct", not_shared: str = "") -> ProcessResult:
    timed = [{"descriptors": n, "bytes": size, "seconds": s} for n, size, s in (SMALL, LARGE)]
    chosen = {"strategy": strategy, "not_shared": not_shared}
    return told({"machine": {"cpu": "Some CPU"}}, *timed, chosen, ucx=UCX.replace("WAY", transports))


def plugins(**why: str) -> list[dict]:
    lines: list[dict] = [{"version": "1.5.1", "verbs": True}]
    for name, text in why.items():
        lines += [{"trying": name}, {"plugin": name, "why": text}]
    return lines


def test_a_missing_nixl_is_a_note():
    (found,) = nixl.check(None, lambda: pytest.fail("nothing is started"))
    assert found.state is State.NOTE


def test_plugins_that_start_and_that_do_not():
    found = [*nixl.check("1.5.1", lambda: told(*plugins(UCX="", GDS="no device", POSIX="")))]
    assert [one.state for one in found] == [State.OK] * 3
    assert found[0].found.endswith("UCX, POSIX")
    assert found[1].found.endswith(": GDS")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (told(*plugins(UCX="NIXL_ERR_BACKEND")), "does not start: NIXL_ERR_BACKEND"),
        (told(code=1, err="x\nImportError: libucp.so\n"), "does not start: ImportError: libucp.so"),
        (told(code=None), "it did not finish in time"),
    ],
)
def test_a_missing_ucx_is_bad(ended, said):
    (found,) = nixl.check("1.5.1", lambda: ended)
    assert found.state is State.BAD
    assert said in found.found


def test_a_process_that_dies_after_nixl_is_bad():
    *_, last = nixl.check("1.5.1", lambda: told(*plugins(UCX=""), code=-11))
    assert (last.state, "crashes when it exits (signal 11 ended it)" in last.found) == (State.BAD, True)


@pytest.mark.parametrize("code", [-11, None])
def test_a_plugin_that_nobody_uses_may_crash_or_hang(code):
    *_, last = nixl.check("1.5.1", lambda: told(*plugins(UCX=""), {"trying": "GDS"}, code=code))
    assert (last.state, last.found[:15]) == (State.NOTE, "GDS crashes the")


def test_the_transport_of_reads_is_read_from_the_log_of_ucx():
    assert reads.transport_of(UCX.replace("WAY", "cma/memory").splitlines()) == ("cma/memory",)
    assert reads.transport_of(["nothing", "| a | b | c |"]) == ()
    emulated = UCX.replace("WAY", "tcp/lo").replace("zero-copy", "software emulation")
    assert reads.transport_of(emulated.splitlines()) == ("tcp/lo (emulated)",)


def findings(
    environment, *ended: ProcessResult, several_machines: bool = False, rdma: tuple[str, ...] = ()
) -> list[Finding]:
    asked: list[str | None] = []

    def once(transports):
        asked.append(transports)
        return ended[len(asked) - 1]

    checked = reads.check(
        environment, once, several_machines=several_machines, rdma_devices=lambda: list(rdma)
    )
    found = [one for one in checked if isinstance(one, Finding)]
    assert asked == [None, "^sm"][: len(ended)]
    return found


def test_reads_are_reported_with_transport_and_speed():
    here, away = findings({}, read(), read("tcp/eth0"))
    assert here.state is State.OK
    assert "by cma/memory: 1.7 GB/s in pieces of 4 KiB, 11 GB/s in pieces of 2 MiB" in here.found
    assert (away.state, away.advice, "read over TCP" in away.found) == (State.OK, "", True)


def test_the_speed_over_tcp_is_an_estimate_if_a_setting_names_another_machine():
    _, away = findings({}, read(), read("tcp/eth0"), several_machines=True)
    assert (away.state, "use a network tool such as iperf3" in away.advice) == (State.NOTE, True)


@pytest.mark.parametrize(
    ("targets", "settings", "several"),
    [
        ([], [], False),
        ([Target("here", url="http://127.0.0.1:8000")], [{}], False),
        ([Target("here", control=("localhost", 1))], [{"peers": ["::1"]}], False),
        ([Target("there", url="http://node2:8000")], [], True),
        ([Target("there", control=("10.0.0.2", 5600))], [], True),
        ([], [{}, {"host": "10.0.0.1"}], True),
        ([], [{"host": "node"}], True),
        ([], [{"host": "0.0.0.0", "advertise_host": "127.0.0.1"}], False),
        ([], [{"peers": ["node2"]}], True),
        ([], [{"host": "10.0.0.1", "transfer": False, "tiers": "default"}], False),
    ],
)
def test_a_setting_names_another_machine(targets, settings, several):
    assert names_other_machines(targets, [parse_config(one) for one in settings]) is several


def test_rdma_that_ucx_does_not_use_is_bad():
    assert findings({}, read(), read("tcp/eth0"), rdma=("mlx5_0",))[1].state is State.BAD
    assert findings({}, read(), read("rc_mlx5/mlx5_0:1"), rdma=("mlx5_0",))[1].state is State.OK


def test_reads_that_fail_are_bad():
    (found,) = findings({"UCX_TLS": "shm"}, told(err="no active messages transport", code=1))
    assert (found.state, "add tcp" in found.advice) == (State.BAD, True)
    assert findings({}, read(), told(code=None))[1].state is State.BAD


def gpu_read(way: str, *chosen: str) -> ProcessResult:
    """Output of a process that reads GPU memory by one transport, and host memory by another."""
    of_gpu = UCX.replace("into host memory from host", "into cuda/GPU0 from cuda/GPU1").replace("WAY", way)
    ended = read("cma/memory", *chosen)
    return ProcessResult(ended.code, of_gpu + ended.out, ended.err)


@pytest.mark.parametrize(
    ("way", "state", "says"),
    [
        ("cuda_ipc/cuda", State.OK, "by cuda_ipc/cuda: 1.7 GB/s in pieces of 4 KiB"),
        ("rc_mlx5/mlx5_0:1", State.OK, "directly by RDMA between two GPUs"),
        ("tcp/eth0", State.NOTE, "bounces it through host memory"),
    ],
)
def test_reads_of_gpu_memory_are_reported_with_transport_and_speed(way, state, says):
    (found,) = reads.check_gpu(["0", "1"], lambda: gpu_read(way))
    assert found.state is state
    assert says in found.found
    assert "cma" not in found.found, "that is the way of host memory"


def test_gpu_memory_that_cannot_be_read_is_bad():
    (found,) = reads.check_gpu(["0"], lambda: told(err="no cuda_ipc", code=1))
    assert (found.state, "no cuda_ipc" in found.found) == (State.BAD, True)


def test_gpu_reads_are_not_measured_without_a_gpu():
    (found,) = reads.check_gpu([], lambda: pytest.fail("nothing to measure"))
    assert found.found.startswith("not measured: no GPU here")


def test_an_operators_choice_of_transports_is_kept():
    (found,) = findings({"UCX_TLS": "tcp,self"}, read("tcp/lo"))
    assert "(UCX_TLS=tcp,self)" in found.found


@pytest.mark.parametrize(
    ("strategy", "not_shared", "says"),
    [
        ("shared", "", "copy through shared host memory instead (strategy shared)"),
        ("direct", "", "engines of this machine read so (strategy direct)"),
        ("direct", "no memfd", "(strategy direct), because they cannot share host memory (no memfd)"),
    ],
)
def test_the_choice_for_engines_of_this_machine_is_said(strategy, not_shared, says):
    (here,) = findings({"UCX_TLS": "tcp,self"}, read("tcp/lo", strategy, not_shared))
    assert here.found.endswith(says)
    (gpu,) = reads.check_gpu(["0"], lambda: gpu_read("tcp/lo", strategy, not_shared))
    assert (gpu.state, gpu.found.endswith(says)) == (State.NOTE, True)


REAL = Costs(read_descriptor_seconds=2e-6, read_byte_seconds=8e-11)
MADE = "2026-01-31T12:00:00+00:00"
NOW = datetime(2026, 2, 10, tzinfo=UTC)


def written(tmp_path, of=REAL, made=MADE, cpu="Some CPU") -> str:
    path = tmp_path / "costs.json"
    write_costs(path, of, made, {"cpu": cpu})
    return str(path)


def measured() -> reads.ReadTimings:
    found = reads.parse_timings(read())
    assert isinstance(found, reads.ReadTimings)
    return found


def test_recent_costs_of_this_machine_are_ok(tmp_path):
    found = costs.check(written(tmp_path), measured(), NOW)
    assert (found.state, found.found[:19]) == (State.OK, "measured 2026-01-31")


def test_missing_costs_are_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not default_costs_path().exists()
    found = costs.check(None, measured())
    assert (found.state, "built-in costs" in found.found) == (State.NOTE, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"made": "2024-01-31T12:00:00"}, "days ago"),
        ({"cpu": "Another CPU"}, "measured on another machine (Another CPU; this is Some CPU)"),
        ({"of": Costs(read_byte_seconds=1e-9)}, "is far off: a READ takes 0.1 times the predicted time"),
        ({"of": Costs(read_descriptor_seconds=1e-9, read_byte_seconds=1e-11)}, "is far off"),
    ],
)
def test_outdated_or_foreign_costs_are_noted(tmp_path, changes, said):
    found = costs.check(written(tmp_path, **changes), measured(), NOW)
    assert found.state is State.NOTE
    assert said in found.found


def test_unreadable_costs_are_bad(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("{}")
    assert costs.check(str(path), None).state is State.BAD
    assert costs.check(str(tmp_path / "none"), None).state is State.BAD


def test_calibrating_writes_the_costs_and_says_each(tmp_path):
    path = tmp_path / "costs.json"
    measured_costs = Costs(read_descriptor_seconds=4e-6, overlap=0.683)
    found = list(calibrate(str(path), lambda _: None, lambda _: calibration(measured_costs)))
    assert load_costs(str(path)) == measured_costs
    said = {one.subject: one.found for one in found}
    assert said["READ, per descriptor"] == "4 µs; built in: 2 µs"
    assert said["gathering hidden behind reading"] == "68.3 %; built in: 0 %"
    assert said["prediction"].startswith(
        "2 kinds of reads within 8% (median), 13% (worst); 2 kinds of copies"
    )
    assert said["costs file"] == f"written to {path}; engines read it when they start"
    assert costs.check(str(path), None).state is State.OK


def test_a_calibration_that_fails_writes_nothing(tmp_path):
    def fail(_):
        raise TransferError("the producer process ended; see its messages")

    (found,) = calibrate(str(tmp_path / "costs.json"), lambda _: None, fail)
    assert (found.state, found.advice) == (State.BAD, "see its messages")
    assert not list(tmp_path.iterdir())
