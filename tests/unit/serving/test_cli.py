"""The commands as processes: what they print and how they end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
import typer
from typer.testing import CliRunner

from kvferry import extras
from kvferry.cli.config import SETTINGS
from kvferry.cli.main import app, main
from kvferry.cli.usage import GroupedCommands
from kvferry.connector.config import ConnectorConfig
from kvferry.transport.key_file import read_keys

pytestmark = pytest.mark.slow

KVFERRY = [sys.executable, "-c", "from kvferry.cli.main import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVFERRY, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    for command in ("serve", "router", "config", "demo"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("group", ["", "bench", "cache"])
def test_help_says_of_every_command_in_a_whole_sentence_what_it_does(group):
    done = CliRunner().invoke(app, [*group.split(), "--help"], env={"COLUMNS": "80"})
    listed = re.findall(r"^  [a-z]+ {2,}.*$", done.output.split(" --help ")[1], re.MULTILINE)
    assert len(listed) > 2
    for line in listed:
        assert re.fullmatch(r"  [a-z]+ +[A-Z].*[^.]\.", line), line
        assert len(line) <= 80


def test_help_lists_every_command_by_purpose_and_plan_serve_doctor_first():
    listed = [name for names in GroupedCommands.purposes.values() for name in names]
    assert listed[:3] == ["plan", "serve", "doctor"]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", ["", "serve", "cache", "cache ls", "bench transfer"])
def test_h_is_short_for_help(command):
    short, whole = (CliRunner().invoke(app, [*command.split(), option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, whole.output)


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app).commands))
def test_help_fits_80_columns_and_shows_examples_that_have_known_options(command):
    output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines())) <= 80
    shown = re.findall(rf"^ +kvferry {command}(.*)$", output.partition("Examples:\n")[2], re.MULTILINE)
    assert shown or command in {"bench", "cache", "config"}
    for option in re.findall(r"--[a-z]\S*", " ".join(line.partition(" -- ")[0] for line in shown)):
        assert re.search(rf"^  .*{option}\b", output, re.MULTILINE), option


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pln"], "no such command 'pln'; did you mean 'plan'"),
        (["plan", "--tokenz", "5"], "kvferry plan has no option --tokenz; did you mean --tokens?"),
        (["plan", "--qqqq"], "kvferry plan has no option --qqqq; run kvferry plan --help for its options"),
        (["plan", "m", "--tokens", "x"], "invalid value for '--tokens': "),
        (["plan", "m", "n"], "got unexpected extra argument"),
        (["serve"], "MODEL is missing; give a path or a Hugging Face id, such as Qwen/Qwen3-0.6B"),
        (["keygen"], "missing argument 'FILE'; run kvferry keygen --help for its arguments"),
        (["serve", "m", "--prot", "1"], "kvferry serve has no option --prot; did you mean --port?"),
        (
            ["serve", "m", "--port", "0", "--max-model-len", "8192"],
            (
                "kvferry serve has no option --max-model-len; if it is vLLM's, write it after --: "
                "kvferry serve MODEL -- --max-model-len 8192\n"
            ),
        ),
        (
            ["serve", "m", "--dtype=half", "--port", "0"],
            (
                "kvferry serve has no option --dtype; if it is vLLM's, write it after --: "
                "kvferry serve MODEL -- --dtype=half\n"
            ),
        ),
        (
            ["serve", "--enforce-eager", "m"],
            (
                "kvferry serve has no option --enforce-eager; if it is vLLM's, write it after --: "
                "kvferry serve MODEL -- --enforce-eager\n"
            ),
        ),
        (
            ["demo", "--enforce-eager"],
            (
                "kvferry demo has no option --enforce-eager; if it is vLLM's, write it after --: "
                "kvferry demo -- --enforce-eager\n"
            ),
        ),
        (
            ["serve", "m", "--tensor-parallel-size", "2"],
            "kvferry serve has no option --tensor-parallel-size; use --tp\n",
        ),
        (["serve", "m", "-tp=2"], "kvferry serve has no option -tp; use --tp\n"),
        (["plan", "m", "-tp", "2"], "kvferry plan has no option -tp; use --tp\n"),
        (["serve", "--model", "m"], "kvferry serve has no option --model; give MODEL without an option\n"),
        (
            ["config", "-tp", "2"],
            "kvferry config has no option -tp; run kvferry config --help for its options\n",
        ),
        (
            ["config", "--role", "x"],
            "invalid value for '--role': 'x' is not one of 'prefill', 'decode', 'both'",
        ),
        (
            ["config", "--host"],
            "option '--host' requires an argument; run kvferry config --help for its arguments\n",
        ),
        (
            ["cache", "ls", "-o"],
            "option '-o' requires an argument; run kvferry cache ls --help for its arguments\n",
        ),
        (["cache", "lss", "."], "no such command 'lss'; did you mean 'ls'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_sentence_with_the_nearest_option(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvferry", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert error.startswith(f"kvferry: {said}")
    assert error.count("\n") == 1
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("serve m", "vLLM", "vllm"),
        ("demo", "vLLM", "vllm"),
        ("bench tiers", "torch", "bench"),
        ("bench transfer", "torch", "bench"),
        ("bench calibrate", "torch", "bench"),
    ],
)
def test_a_command_says_which_extra_it_needs(command, package, extra, monkeypatch, capsys):
    monkeypatch.setattr(extras, "_is_installed", lambda _: False)
    monkeypatch.setattr(sys, "argv", ["kvferry", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    name = command.removesuffix(" m")
    on_a_cpu = ", or vLLM's build for CPUs," if extra == "vllm" else ""
    advice = f"install kvferry's extra {extra}{on_a_cpu} as {extras.INSTALL_PAGE} says"
    wanted = f"needs {package}, which is not installed; {advice}"
    assert (ended.value.code, capsys.readouterr().err) == (2, f"kvferry: kvferry {name} {wanted}\n")


def test_config_prints_one_line_of_json():
    done = run("config", "--role", "decode", "--port", "7000", "--lease-seconds", "5")
    assert done.stdout.count("\n") == 1
    config = json.loads(done.stdout)
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_connector_extra_config"] == {"port": 7000, "lease_seconds": 5.0}


def test_config_has_one_option_for_each_setting():
    assert {*SETTINGS} == {*ConnectorConfig.__struct_fields__}


def test_config_takes_a_secret(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    done = run("config", "--host", "10.0.0.7", "--secret-file", str(secret))
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra == {"host": "10.0.0.7", "secret_file": str(secret)}


def test_config_makes_no_key_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run("config", "--host", "10.0.0.7").returncode == 0
    assert not (tmp_path / "state").exists()


def test_keygen_makes_a_secret_that_engines_take_and_overwrites_none(tmp_path):
    secret = tmp_path / "secret"
    done = run("keygen", str(secret))
    assert (done.returncode, done.stdout) == (
        0, f"{secret}: fingerprint {read_keys(str(secret)).fingerprint}\n"
    )  # fmt: skip
    again = run("keygen", str(secret))
    assert (again.returncode, "exists and is not overwritten" in again.stderr) == (2, True)
    assert len(run("keygen", "-").stdout) == len(secret.read_text())


def test_config_takes_peers_and_refuses_what_names_none():
    done = run("config", "--peers", "10.0.0.0/8", "--peers", "prefill.svc")
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra == {"peers": ["10.0.0.0/8", "prefill.svc"]}
    done = run("config", "--peers", "*.svc")
    assert (done.returncode, "peers[0] is '*.svc'; give a host name" in done.stderr) == (2, True)


def test_config_takes_the_default_tiers():
    done = run("config", "--tiers", "default", "--chunk-tokens", "128", "--snapshot-tokens", "4096")
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra == {"tiers": "default", "chunk_tokens": 128, "snapshot_tokens": 4096}


def test_config_puts_other_connectors_beside_ours():
    others = [{"kv_connector": "NixlConnector", "load_weight": 0.5}]
    options = "--tiers", "default", "--source-policy", "cost", "--other-connectors", json.dumps(others)
    done = run("config", *options)
    config = json.loads(done.stdout)
    assert config["kv_connector"] == "FerryMultiConnector"
    extra = config["kv_connector_extra_config"]
    assert (extra["connectors"][:-1], extra["source_policy"]) == (others, "cost")
    ours = extra["connectors"][-1]
    assert ours["kv_connector"] == "KVFerryConnector"
    assert ours["kv_connector_extra_config"] == {"tiers": "default", "source_policy": "cost"}


def test_config_writes_absolute_paths_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv").mkdir()
    tiers = json.dumps([{"type": "file", "path": "kv"}, {"type": "file"}])
    done = run("config", "--tiers", tiers, "--transfer", "--transfer-log", "log", "--record", "trace")
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert extra["tiers"] == [{"type": "file", "path": str(tmp_path / "kv")}, {"type": "file"}]
    assert extra["transfer_log"] == str(tmp_path / "log")
    assert extra["record"] == str(tmp_path / "trace")
    assert [each.name for each in tmp_path.iterdir()] == ["kv"]


def test_config_does_not_make_the_file_that_a_link_leads_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "log")
    assert run("config", "--transfer-log", str(link)).returncode == 0
    assert [each.name for each in tmp_path.iterdir()] == ["link"]
    assert link.is_symlink()


def test_config_shows_every_setting_and_marks_defaults():
    options = "--tiers", '[{"type": "host", "capacity": "8MiB"}]', "--chunk-tokens", "64"
    shown = run("config", "--show-defaults", *options).stdout.splitlines()
    keys = [line.partition(" = ")[0] for line in shown]
    assert len(keys) == len({*keys})
    assert {*ConnectorConfig.__struct_fields__} - {"tiers"} <= {*keys}
    assert 'tiers[0].capacity = "8MiB"' in shown
    assert 'tiers[0].eviction_policy = "lru"  # default' in shown
    assert "chunk_tokens = 64" in shown
    assert "transfer = false  # default" in shown


def test_config_takes_tiers_as_json_and_transfer_beside_them(tmp_path):
    tiers = [{"type": "host", "capacity": "8MiB"}, {"type": "file", "path": str(tmp_path), "write": "back"}]
    done = run("config", "--tiers", json.dumps(tiers), "--transfer")
    assert json.loads(done.stdout)["kv_connector_extra_config"] == {"tiers": tiers, "transfer": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config", "--lease-seconds", "-1"], "lease_seconds is -1.0"),
        (["config", "--attempts", "99"], "attempts is 99, it must be 1 to 16"),
        (["config", "--secret-file", "/nowhere"], "secret_file /nowhere: No such file"),
        (["config", "--secret-file", "/dev/null"], "secret_file /dev/null is no regular file"),
        (["config", "--costs", "/nowhere"], "costs: cannot read /nowhere: No such file"),
        (
            ["config", "--strategy", "fast"],
            "kv_connector_extra_config: strategy is 'fast'; it must be one of auto",
        ),
        (
            ["config", "--transfer-log", "/nowhere/log"],
            "transfer_log /nowhere/log: No such file or directory; name a file that can be written",
        ),
        (
            ["config", "--record", "/nowhere/trace", "--no-transfer", "--tiers", "default"],
            "record /nowhere/trace: No such file or directory; name a file that can be written",
        ),
        (
            ["config", "--tiers", '[{"type": "file", "path": "/nowhere/kv"}]'],
            "file tier: /nowhere/kv does not exist; make the directory, or mount the disk it is on",
        ),
        (
            ["config", "--tiers", '[{"type": "host", "capacity": "900TiB"}]'],
            "host tier: 900 TiB of shared memory, but ",
        ),
        (
            ["config", "--tiers", '[{"type": "object", "url": "nothing://kv"}]'],
            "object tier: ",
        ),
        (
            ["config", "--chunk-tokens", "128", "--snapshot-tokens", "200", "--tiers", "default"],
            "snapshot_tokens is 200; it must be a multiple of a chunk's 128 tokens, 128 for instance",
        ),
        (["config", "--host-buffer", "--turn-seconds", "9"], "turn_seconds is set, and KV moves through a"),
        (["config", "--tiers", "[{"], "tiers is '[{', which is no JSON (Expecting property name"),
        (["config", "--tiers", "3"], 'tiers is 3; it must be "default" or a list of objects with a "type"'),
        (["config", "--tiers", '[{"type": "disk"}]'], "tiers[0] is {'type': 'disk'}; it must be an object"),
        (
            ["config", "--tiers", '[{"type": "file", "pat": "x"}]'],
            "tiers[0] (file) has no key 'pat'; did you mean 'path'?",
        ),
        (["config", "--admin", '{"prt": 1}'], "admin has no key 'prt'; did you mean 'port'?"),
        (
            ["config", "--admin", f'{{"port": {"9" * 5000}}}'],
            """admin is '{"port": 9999""",
        ),
        (
            ["config", "--show-defaults", "--other-connectors", "[]"],
            "--show-defaults prints kvferry's own settings only; leave --other-connectors out",
        ),
        (["config", "--other-connectors", "{"], "other_connectors is '{', which is no JSON (Expecting"),
        (["config", "--other-connectors", "{}"], "connectors is {}; it must be a list of objects"),
        (
            ["config", "--other-connectors", "[{}]"],
            'connectors[0] is {}; it must be an object whose "kv_connector"',
        ),
        (["config", "--no-transfer"], "transfer is false and there are no tiers"),
        (
            ["config", "--tiers", "default", "--chunk-tokens", "0"],
            "chunk_tokens is 0, it must be 1 to 1048576",
        ),
        (["router", "--decode", "http://127.0.0.1:1"], "the router has no prefill engine"),
        (["router", "--prefill", "http://127.0.0.1:1"], "the router has no decode engine"),
        (["router", "--prefill", "x", "--decode", "y"], "--prefill x is not a URL"),
        (["router", "--engines-file", "x", "--decode", "y"], "--engines-file is given with"),
        (["router", "--engines-file", "/nothing"], "cannot read engines from /nothing"),
        (
            ["router", "--prefill", "http://[::1", "--decode", "http://y:1"],
            "--prefill http://[::1 is not a URL",
        ),
        (
            ["router", "--prefill", "http://x:1", "--decode", "http://y:99999"],
            "--decode http://y:99999 is not a URL",
        ),
        (["serve", "/nowhere"], "there is no model at /nowhere"),
        (
            ["serve", "m", "--port", "0", "--log-dir", "/proc/none"],
            "cannot make the folder /proc/none for the",
        ),
        (
            ["serve", "m", "--role", "both", "--prefill", "2"],
            "--prefill is given beside --role both, but it is for prefill and decode engines; use --engines",
        ),
        (["serve", "m", "--role", "decode"], "--role is decode, but kvferry serve starts both sides of an"),
        (["serve", "m", "--engines", "2"], "--engines is given without --role both; use --prefill and"),
        (["serve", "m", "--role", "both", "--engines", "0"], "engine is 0, it must be at least 1"),
        (["serve", "m", "--prefill-args", "'x"], '--prefill-args is "\'x": No closing quotation; close'),
        (["serve", "m", "--decode-args=--port 7"], "--port cannot be the same for every engine"),
        (["serve", "m", "--tiers", '[{"type": "file", "path": "/no"}]'], "file tier: /no does not exist"),
        (["serve", "m", "--", "-dp", "0"], "-dp is '0', it must be a whole number of at least 1"),
        (["serve", "m", "--", "--port", "7"], "--port cannot be the same for every engine"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvferry: {said}")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_one_sentence_and_exit_code_1(stage, fake):
    port = str(stage([fake()], [fake()]).client.base_url.port)
    done = run("router", "--prefill", "http://a:1", "--decode", "http://b:1", "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvferry: cannot listen on 127.0.0.1:{port}: Address already in use by ")
    assert f"(process {os.getpid()}); choose another --host or --port" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_router_serves_until_a_signal(fake, serve_app, kv, number, code):
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(fake().app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            url = re.fullmatch(r"kvferry: serving on (http://127\.0\.0\.1:\d+)/v1\n", line)[1]
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, trust_env=False)
            process.send_signal(number)
            assert process.wait(20) == code
    assert answer.status_code == 200


@pytest.mark.parametrize("trusts", [False, True])
def test_the_router_keeps_kv_transfer_params_of_callers_only_if_it_is_told_to(fake, serve_app, kv, trusts):
    engine, sent = fake(), {"prompt": "x", "kv_transfer_params": {"remote_engine_id": "the front's"}}
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(engine.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        command += ["--min-prefill-tokens", "0"]
        command += ["--trust-kv-transfer-params"] * trusts
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().split()[-1]
            answer = httpx.post(f"{url}/completions", json=sent, trust_env=False)
            process.terminate()
            assert (answer.status_code, process.wait(20)) == (200, 0)
    assert engine.bodies[0]["kv_transfer_params"] == (sent["kv_transfer_params"] if trusts else kv)


def test_the_router_serves_where_standard_output_is_closed(fake, serve_app, kv, tmp_path):
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(fake().app()) as decode:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", str(port)]
        closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
        with subprocess.Popen(closed, stderr=subprocess.PIPE, text=True) as process:
            transport = httpx.HTTPTransport(retries=6)
            with httpx.Client(transport=transport, trust_env=False, timeout=20) as client:
                answer = client.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
            process.terminate()
            assert (process.wait(20), process.stderr.read()) == (0, "")
    assert answer.status_code == 200


def test_an_answer_that_is_under_way_when_the_router_is_stopped_ends_with_an_error(fake, serve_app, kv):
    slow = fake(event_seconds=60)
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(slow.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        command += ["--drain-seconds", "0.5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().split()[-1]
            body = {"prompt": "x", "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, trust_env=False, timeout=20) as answer:
                events = answer.iter_text()
                assert "The" in next(events)
                process.send_signal(signal.SIGINT)
                assert "router_stopped" in "".join(events)
            assert process.wait(20) == 130
            assert process.stderr.read() == ""


def test_a_stopped_router_finishes_streams_refuses_requests_and_says_that_it_drains(fake, serve_app, kv):
    slow = fake(event_seconds=0.5)
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(slow.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().split()[-1]
            body = {"prompt": "x", "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, trust_env=False, timeout=20) as answer:
                events = answer.iter_text()
                next(events)
                process.terminate()
                health = httpx.get(f"{url[:-3]}/health", trust_env=False)
                while health.status_code == 200:  # the signal is seen within a fifth of a second
                    health = httpx.get(f"{url[:-3]}/health", trust_env=False)
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                refused = httpx.post(f"{url}/completions", json=body, trust_env=False)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "router_draining")
                assert "".join(events).endswith("data: [DONE]\n\n")
            assert (process.wait(20), process.stderr.read()) == (0, "")


@pytest.mark.parametrize("arrives", [True, False])
def test_a_stopped_router_waits_for_the_rest_of_a_body(arrives, fake, serve_app, kv):
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(fake().app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        command += ["--drain-seconds", "20" if arrives else "0.5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = httpx.URL(process.stdout.readline().split()[-1])
            with socket.create_connection((url.host, url.port), timeout=30) as sock:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{")
                while "active_requests 1.0" not in httpx.get(url.join("/metrics"), trust_env=False).text:
                    pass
                process.terminate()
                if arrives:
                    while httpx.get(url.join("/health"), trust_env=False).status_code == 200:
                        pass
                    time.sleep(0.3)  # a router that waits for nothing has closed its port by then
                    assert httpx.get(url.join("/health"), trust_env=False).json()["status"] == "draining"
                    sock.sendall(b'"prompt": "x"}')
                answer = sock.makefile("rb").read()
            assert (process.wait(20), process.stderr.read()) == (0, "")
    assert answer.startswith(b"HTTP/1.1 200 " if arrives else b"HTTP/1.1 503 ")
    assert (b"router_stopped" in answer) is not arrives


def test_a_second_signal_ends_a_draining_router_at_once(fake, serve_app, kv):
    slow = fake(event_seconds=60)
    with serve_app(fake(hands_over=kv).app()) as prefill, serve_app(slow.app()) as decode:
        command = [*KVFERRY, "router", "--prefill", prefill, "--decode", decode, "--port", "0"]
        command += ["--drain-seconds", "3600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().split()[-1]
            body = {"prompt": "x", "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, trust_env=False, timeout=20) as answer:
                events = answer.iter_text()
                next(events)
                process.terminate()
                while httpx.get(f"{url[:-3]}/health", trust_env=False).status_code == 200:
                    pass
                process.terminate()
                assert process.wait(20) == 0
                events.close()
            assert process.stderr.read() == ""
