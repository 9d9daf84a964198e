"""`kvferry doctor` and `kvferry --version`: what they print and how they end."""

import json
import re
import socket
from importlib.metadata import PackageNotFoundError

import pytest

from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.role import Role
from kvferry.transport.control_server import ControlServer
from kvferry.transport.messages import PeerInfo
from kvferry.transport.security import read_keys
from support.command_line import run_kvferry
from transport.cards import cards, facts

pytestmark = pytest.mark.slow


def test_a_configuration_that_is_well(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    path = tmp_path / "kv.json"
    path.write_text(json.dumps(kv_transfer_config(Role.PREFILL, {"tiers": "default", "transfer": True})))
    done = run_kvferry("doctor", "--no-machine", "--config", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Nothing to fix")
    first, *findings = done.stdout.splitlines()[:-2]
    assert first == f"configuration {path}"
    assert all(line.startswith("  ok   ") for line in findings), "without a terminal nothing is wrapped"
    assert done.stderr == ""


def test_all_faults_of_a_configuration_are_reported_together(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tiers = [{"type": "host", "capacity": "900TiB"}, {"type": "file", "path": str(tmp_path / "none")}]
        extra = {"port": taken.getsockname()[1], "tiers": tiers, "transfer": True, "costs": "/nowhere"}
        path = tmp_path / "kv.json"
        path.write_text(json.dumps({**kv_transfer_config(Role.BOTH), "kv_connector_extra_config": extra}))
        done = run_kvferry("doctor", "--no-machine", "--json", "--config", str(path))
    assert done.returncode == 1
    (section,) = json.loads(done.stdout)["sections"]
    wrong = [one["subject"] for one in section["findings"] if one["state"] == "bad"]
    assert wrong == ["port", "costs", "host memory", "tier 1, file"]


def test_unreachable_addresses_are_bad():
    # Of a network that is in use nowhere (RFC 5737), and a port of this machine.
    done = run_kvferry("doctor", "--no-machine", "kvferry://192.0.2.1:5600", "kvferry://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 of 2 checks found something to fix."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is nothing to check"),
        (["x"], "'x' is not an engine's address"),
        (["--config", "/nowhere"], "--config /nowhere: No such file"),
        (["--secret-file", "/nowhere"], "secret_file /nowhere: No such file"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_sentence_and_exit_code_2(arguments, said):
    done = run_kvferry("doctor", "--no-machine", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvferry: {said}")
    assert done.stderr.count("\n") == 1


def test_versions_are_printed():
    done = run_kvferry("--version")
    assert done.returncode == 0
    assert re.match(r"kvferry \d+\.\d+\.\d+\n", done.stdout)


def test_versions_of_missing_packages_are_left_out(monkeypatch):
    monkeypatch.setattr("kvferry.engines.vllm.version.version", missing)
    assert re.fullmatch(r"kvferry \S+\n", run_kvferry("--version").stdout)


def missing(name: str) -> str:
    raise PackageNotFoundError(name)


def test_a_machine_without_vllm_and_nixl_is_checked(monkeypatch):
    monkeypatch.setattr("kvferry.engines.vllm.version.version", missing)
    done = run_kvferry("doctor", "--json")
    (section,) = json.loads(done.stdout)["sections"]
    said = {one["subject"]: one for one in section["findings"]}
    for absent in ("vLLM", "NIXL"):
        assert (said[absent]["state"], "not installed" in said[absent]["found"]) == ("note", True)
    assert "NIXL reads of host memory" not in said
    assert {
        "locked memory",
        "open files",
        "/dev/shm",
        "large pages",
        "key",
        "chunk names",
        "weights",
        "costs",
    } <= said.keys()


@pytest.fixture
def secured(tmp_path):
    """An engine's control channel with a secret, and the secret's file."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef")
    secret.chmod(0o600)
    server = ControlServer("127.0.0.1", 0, PeerInfo(facts(), cards()), read_keys(str(secret)))
    yield f"kvferry://127.0.0.1:{server.port}", secret
    server.close()


def test_an_engine_with_this_machines_key_needs_no_option(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = ControlServer("127.0.0.1", 0, PeerInfo(facts(), cards()), read_keys(None))
    done = run_kvferry("doctor", "--no-machine", f"kvferry://127.0.0.1:{server.port}")
    server.close()
    assert (done.returncode, "encrypted, answers in" in done.stdout) == (0, True)


def test_an_engine_with_a_secret_is_reached_with_the_option_or_the_configuration(
    secured, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no key here"))
    address, secret = secured
    done = run_kvferry("doctor", "--no-machine", address)
    assert (done.returncode, "asks for a key" in done.stdout) == (1, True)
    done = run_kvferry("doctor", "--no-machine", "--secret-file", str(secret), address)
    assert (done.returncode, "encrypted, answers in" in done.stdout) == (0, True)
    config = tmp_path / "kv.json"
    config.write_text(json.dumps({"secret_file": str(secret)}))
    done = run_kvferry("doctor", "--no-machine", "--config", str(config), address)
    assert (done.returncode, "encrypted, answers in" in done.stdout) == (0, True)
