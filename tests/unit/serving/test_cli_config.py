"""`kvferry config` and `kvferry keygen`."""

import json
import re
import subprocess
import tomllib

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig
from kvferry.tools.cli import config as command
from kvferry.tools.serving import specs
from kvferry.transport.security import read_keys
from support.command_line import KVFERRY, run_kvferry
from support.setting_examples import EXAMPLES

SETTINGS = [one.name for one in command.SETTINGS]


def configured(*options: str) -> dict:
    """Return the connector's settings that `kvferry config` prints."""
    done = run_kvferry("config", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["kv_connector_extra_config"]


@pytest.mark.slow
def test_config_prints_one_line_of_json():
    command = [*KVFERRY, "config", "--role", "decode", "--port", "7000", "--lease-seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("\n") == 1
    config = json.loads(done.stdout)
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_connector_extra_config"] == {"port": 7000, "lease_seconds": 5.0}


def test_config_has_one_option_for_each_setting():
    missing = "add the setting to ConfigOptions in kvferry/cli/config.py"
    assert {*SETTINGS} == {*ConnectorConfig.__struct_fields__}, missing


def test_config_takes_a_secret(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    given = {"host": "10.0.0.7", "secret_file": str(secret)}
    assert configured("--no-machine", "--host", "10.0.0.7", "--secret-file", str(secret)) == given


def test_config_creates_no_machine_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    configured("--host", "127.0.0.7")
    assert not (tmp_path / "state").exists()


def test_keygen_makes_a_secret_that_engines_take_and_overwrites_none(tmp_path):
    secret = tmp_path / "secret"
    done = run_kvferry("keygen", str(secret))
    assert done.stdout == f"{secret}: fingerprint {read_keys(str(secret)).fingerprint}\n"
    again = run_kvferry("keygen", str(secret))
    assert (again.returncode, "exists and is not overwritten" in again.stderr) == (2, True)
    assert len(run_kvferry("keygen", "-").stdout) == len(secret.read_text())


def test_config_takes_several_peers():
    peers = ["10.0.0.0/8", "prefill.svc"]
    assert configured("--peers", peers[0], "--peers", peers[1]) == {"peers": peers}


def test_config_takes_the_default_tiers():
    options = "--tiers", "default", "--chunk-tokens", "128", "--snapshot-tokens", "4096"
    assert configured(*options) == {"tiers": "default", "chunk_tokens": 128, "snapshot_tokens": 4096}


def test_config_takes_tiers_as_json_and_transfer_beside_them(tmp_path):
    tiers = [{"type": "host", "capacity": "8MiB"}, {"type": "file", "path": str(tmp_path), "write": "back"}]
    assert configured("--tiers", json.dumps(tiers), "--transfer") == {"tiers": tiers, "transfer": True}


def test_config_puts_other_connectors_beside_ours():
    others = [{"kv_connector": "NixlConnector", "load_weight": 0.5}]
    options = "--tiers", "default", "--source-policy", "cost", "--other-connectors", json.dumps(others)
    config = json.loads(run_kvferry("config", *options).stdout)
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
    extra = configured("--tiers", tiers, "--transfer", "--transfer-log", "log", "--record", "trace")
    assert extra["tiers"] == [{"type": "file", "path": str(tmp_path / "kv")}, {"type": "file"}]
    assert extra["transfer_log"] == str(tmp_path / "log")
    assert extra["record"] == str(tmp_path / "trace")
    assert [each.name for each in tmp_path.iterdir()] == ["kv"]


def test_config_does_not_make_the_file_that_a_link_leads_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "log")
    configured("--transfer-log", str(link))
    assert [each.name for each in tmp_path.iterdir()] == ["link"]
    assert link.is_symlink()


def test_config_shows_every_setting_and_marks_defaults():
    options = "--tiers", '[{"type": "host", "capacity": "8MiB"}]', "--chunk-tokens", "64"
    shown = run_kvferry("config", "--show-defaults", *options).stdout.splitlines()
    keys = [line.partition(" = ")[0] for line in shown]
    assert len(keys) == len({*keys})
    assert {*ConnectorConfig.__struct_fields__} - {"tiers"} <= {*keys}
    assert 'tiers[0].capacity = "8MiB"' in shown
    assert 'tiers[0].eviction_policy = "lru"  # default' in shown
    assert "chunk_tokens = 64" in shown
    assert "transfer = false  # default" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lease-seconds", "-1"], "kv_connector_extra_config: lease_seconds is -1.0; it must be above 0"),
        (["--attempts", "99"], "kv_connector_extra_config: attempts is 99; it must be 1 to 16"),
        (["--host", "http://10.0.0.7"], "host is 'http://10.0.0.7'; it must be a host name or IP address"),
        (["--host", ""], "host is ''; it must be a host name or IP address"),
        (["--host", "192.0.2.77"], "host 192.0.2.77 is not an address of this machine; run this where"),
        (["--port", "70000"], "kv_connector_extra_config: port is 70000; it must be 0 to 65535"),
        (
            ["--other-connectors", '[{"kv_connector": "NixlConnector"}]'],
            "NixlConnector and KVFerryConnector would both hand KV over to other engines",
        ),
        (["--peers", "*.svc"], "peers[0] is '*.svc'; give a host name"),
        (["--secret-file", "/nowhere"], "secret_file /nowhere: No such file"),
        (["--secret-file", "/dev/null"], "secret_file /dev/null is no regular file"),
        (["--costs", "/nowhere"], "costs: cannot read /nowhere: No such file"),
        (["--strategy", "fast"], "kv_connector_extra_config: strategy is 'fast'; it must be one of auto"),
        (
            ["--record", "/nowhere/trace", "--no-transfer", "--tiers", "default"],
            "record /nowhere/trace: No such file or directory; name a file that can be written",
        ),
        (
            ["--tiers", '[{"type": "file", "path": "/nowhere/kv"}]'],
            "file tier: /nowhere/kv does not exist; make the directory, or mount the disk it is on",
        ),
        (
            ["--tiers", '[{"type": "host", "capacity": "900TiB"}]'],
            "host tier: 900 TiB of shared memory, but ",
        ),
        (["--tiers", '[{"type": "object", "url": "nothing://kv"}]'], "object tier: "),
        (
            ["--chunk-tokens", "128", "--snapshot-tokens", "200", "--tiers", "default"],
            "snapshot_tokens is 200; it must be a multiple of a chunk's 128 tokens, 128 for instance",
        ),
        (["--host-buffer", "--turn-seconds", "9"], "turn_seconds is set, and KV moves through a"),
        (["--tiers", "[{"], "tiers is '[{', which is no JSON (Expecting property name"),
        (["--tiers", "3"], 'tiers is 3; it must be "default" or a list of objects with a "type"'),
        (["--tiers", '[{"type": "disk"}]'], "tiers[0] is {'type': 'disk'}; it must be an object"),
        (
            ["--tiers", '[{"type": "file", "pat": "x"}]'],
            "tiers[0] (file) has no key 'pat'; did you mean 'path'?",
        ),
        (["--admin", f'{{"port": {"9" * 5000}}}'], """admin is '{"port": 9999"""),
        (
            ["--show-defaults", "--other-connectors", "[]"],
            "--show-defaults prints kvferry's own settings only; leave --other-connectors out",
        ),
        (["--other-connectors", "{}"], "connectors is {}; it must be a list of objects"),
        (["--other-connectors", "[{}]"], 'connectors[0] is {}; it must be an object whose "kv_connector"'),
        (["--no-transfer"], "transfer is false and there are no tiers"),
    ],
    ids=lambda value: " ".join(value)[:80] if isinstance(value, list) else "",
)
def test_config_refuses_wrong_settings_in_one_sentence(options, message):
    done = run_kvferry("config", *options)
    assert done.stderr.startswith(f"kvferry: {message}")
    assert (done.stderr.count("\n"), done.returncode) == (1, 2)


def test_init_writes_every_setting_in_a_comment_with_its_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_kvferry("init").stdout == f"kvferry.toml: {len(SETTINGS)} settings, all with their defaults\n"
    assert configured("--settings", "kvferry.toml") == {}
    lines = (tmp_path / "kvferry.toml").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    given = tomllib.loads("\n".join(line[1:] for line in lines if re.match(r"#[a-z_]+ = [^A-Z]*$", line)))
    defaults = {name: value for name in SETTINGS if (value := getattr(ConnectorConfig(), name)) is not None}
    assert given == defaults
    again = run_kvferry("init")
    assert (again.returncode, "exists and is not overwritten" in again.stderr) == (2, True)
    assert run_kvferry("init", "-").stdout.splitlines() == lines


@pytest.mark.parametrize("name", SETTINGS)
def test_config_reads_a_setting_from_the_file_of_init(name, tmp_path):
    example = EXAMPLES[ConnectorConfig][name]
    value = f"'{json.dumps(example)}'" if name in ("tiers", "tenants", "admin") else json.dumps(example)
    text = re.sub(
        rf"^#{name} = .*$", f"{name} = {value}", run_kvferry("init", "-").stdout, flags=re.MULTILINE
    )
    (tmp_path / "settings.toml").write_text(text)
    found = configured("--settings", str(tmp_path / "settings.toml"), "--no-machine")
    assert found[name] == example


def test_tiers_in_a_settings_file_may_be_toml_too(tmp_path):
    (tmp_path / "settings.toml").write_text('[[tiers]]\ntype = "host"\ncapacity = "8MiB"\n')
    found = configured("--settings", str(tmp_path / "settings.toml"), "--no-machine")
    assert found == {"tiers": [{"type": "host", "capacity": "8MiB"}]}


def test_options_go_before_the_settings_of_a_file(tmp_path):
    (tmp_path / "settings.toml").write_text("lanes = 3\nattempts = 4\n")
    assert configured("--settings", str(tmp_path / "settings.toml"), "--lanes", "5") == {
        "lanes": 5,
        "attempts": 4,
    }


def test_serve_gives_the_settings_of_a_file_to_its_engines(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    groups = []

    def noted(model, given):
        groups.extend(given)
        raise ConfigError("enough")

    monkeypatch.setattr(specs, "group_specs", noted)
    file = tmp_path / "settings.toml"
    file.write_text('lanes = 3\nturn_seconds = 60\ntiers = "default"\n')
    assert run_kvferry("serve", "m", "--settings", str(file)).stderr == "kvferry: enough\n"
    shared = {"lanes": 3, "tiers": "default"}
    assert [group.settings for group in groups] == [
        {**shared, "turn_seconds": None},
        {**shared, "turn_seconds": 60},
    ]
    given = '[{"type": "host"}]'
    run_kvferry("serve", "m", "--settings", str(file), "--role", "both", "--tiers", given)
    assert groups[2].settings == {"lanes": 3, "turn_seconds": 60, "tiers": json.loads(given)}
    file.write_text("port = 5600\n")
    refused = run_kvferry("serve", "m", "--settings", str(file))
    assert refused.stderr.startswith(f"kvferry: port is 5600 in {file}, and kvferry serve starts 2 engines")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lanes = many", "line 1 of settings.toml is no TOML; write a setting as in port = 5600"),
        ("lnes = 3", "has no key 'lnes'; did you mean 'lanes'?"),
        ("\xff", "settings.toml is no TOML"),
        (
            None,
            "cannot read settings.toml: No such file or directory; `kvferry init FILE` writes such a file",
        ),
    ],
)
def test_a_settings_file_that_cannot_be_used_gets_one_sentence(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "settings.toml").write_bytes(text.encode("latin-1"))
    done = run_kvferry("config", "--settings", "settings.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
