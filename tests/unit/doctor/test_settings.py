import json
from importlib.metadata import EntryPoint

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import parse_config
from kvferry.engines.vllm import transfer_config
from kvferry.engines.vllm.transfer_config import summary
from kvferry.tools.doctor.finding import State
from kvferry.tools.doctor.storage import read_file
from kvferry.tools.serving.kv_config import kv_transfer_config, with_other_connectors
from kvferry.tools.serving.role import Role


@pytest.fixture
def given(tmp_path):
    def write(content) -> str:
        path = tmp_path / "kv.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def states(found) -> set[State]:
    return {one.state for one in found.findings}


def test_the_output_of_kvferry_config_has_no_findings(given):
    found = read_file(given(kv_transfer_config(Role.PREFILL, {"tiers": "default", "transfer": True})))
    assert states(found) == {State.OK}
    (config,) = found.configs
    assert summary(config) == "exchanges KV with other engines and keeps it in tiers (host, file)"


def test_the_extra_config_alone_will_do(given):
    found = read_file(given({"port": 5600}))
    assert states(found) == {State.OK}
    assert found.configs == (parse_config({"port": 5600}),)


@pytest.mark.parametrize(
    ("extra", "said", "advice"),
    [
        ({"leese_seconds": 3}, "has no key 'leese_seconds'", "did you mean 'lease_seconds'?"),
        ({"port": 70_000}, "port is 70000", ""),
        ({"tiers": [{"type": "host", "capacity": "many"}]}, "'many' is not a size", "write a number"),
    ],
)
def test_settings_that_the_connector_refuses_are_findings_in_its_words(given, extra, said, advice):
    found = read_file(given({**kv_transfer_config(Role.BOTH), "kv_connector_extra_config": extra}))
    (bad,) = [one for one in found.findings if one.state is State.BAD]
    assert said in bad.found
    assert advice in bad.advice
    assert found.configs == ()


@pytest.mark.parametrize("children", [5, "abc", [5], {"a": 1}, None])
@pytest.mark.parametrize("name", ["FerryMultiConnector", "MultiConnector"])
def test_connectors_that_are_no_list_of_objects_are_a_finding(given, name, children):
    around = {**kv_transfer_config(Role.BOTH), "kv_connector": name}
    around["kv_connector_module_path"] = "kvferry.engines.vllm.multi.connector"
    if name == "MultiConnector":
        del around["kv_connector_module_path"]
    found = read_file(given({**around, "kv_connector_extra_config": {"connectors": children}}))
    (one,) = [one for one in found.findings if one.state is not State.OK]
    assert (one.subject, one.state) == (
        "settings",
        State.BAD if name == "FerryMultiConnector" else State.NOTE,
    )


@pytest.mark.parametrize("name", [None, 5, ["KVFerryConnector"]])
def test_a_connector_is_named_by_a_text(given, name):
    (found,) = read_file(given({"kv_connector": name})).findings
    assert (found.state, found.found) == (State.BAD, f"kv_connector is {name!r}")


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_connector_module_path": "elsewhere"}, "kv_connector_module_path"),
        ({"kv_role": "prefill"}, "kv_role"),
    ],
)
def test_keys_beside_the_extra_config_are_checked(given, change, subject):
    found = read_file(given({**kv_transfer_config(Role.BOTH), **change}))
    (bad,) = [one for one in found.findings if one.state is State.BAD]
    assert f"{subject} is " in bad.found
    assert len(found.configs) == 1


@pytest.mark.parametrize(
    ("plugins", "installed", "found"),
    [(None, True, True), ("kvferry,other", True, True), ("other", True, False), (None, False, False)],
)
def test_the_module_path_may_be_missing_if_vllm_loads_the_plugin(
    given, monkeypatch, plugins, installed, found
):
    ours = EntryPoint("kvferry", "kvferry.engines.vllm.plugin:register", "vllm.general_plugins")
    others = EntryPoint("lora", "vllm.plugins.lora:register", "vllm.general_plugins")
    monkeypatch.setattr(
        transfer_config, "entry_points", lambda group: [others, ours] if installed else [others]
    )
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    read = read_file(given({**kv_transfer_config(Role.BOTH), "kv_connector_module_path": None}))
    bad = [one.found for one in read.findings if one.state is State.BAD]
    missing = "kv_connector_module_path is missing, so vLLM does not find KVFerryConnector"
    assert bad == ([] if found else [missing])


def test_ours_is_found_among_several_connectors(given):
    inner = [{"kv_connector": "LMCacheConnectorV1"}, kv_transfer_config(Role.BOTH, {"port": 5600})]
    several = {**kv_transfer_config(Role.BOTH), "kv_connector": "MultiConnector"}
    del several["kv_connector_module_path"]
    found = read_file(given({**several, "kv_connector_extra_config": {"connectors": inner}}))
    assert [config.port for config in found.configs] == [5600]
    assert states(found) == {State.OK, State.NOTE}


def test_several_connectors_that_kvferry_config_prints_are_well(given):
    ours = kv_transfer_config(Role.BOTH, {"tiers": "default"})
    several = with_other_connectors(ours, [{"kv_connector": "NixlConnector"}])
    found = read_file(given(several))
    assert states(found) == {State.OK, State.NOTE}
    assert len(found.configs) == 1
    assert any("FerryMultiConnector over NixlConnector" in one.found for one in found.findings)


def test_several_connectors_that_would_be_refused_are_refused(given):
    ours = kv_transfer_config(Role.BOTH, {"tiers": "default"})
    several = with_other_connectors(ours, [{"kv_connector": "NixlConnector"}])
    several["kv_connector_extra_config"]["policy"] = "cost"
    found = read_file(given(several))
    assert "did you mean 'source_policy'?" in "".join(one.found + one.advice for one in found.findings)
    alone = {**several, "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]}}
    assert states(read_file(given(alone))) == {State.OK, State.NOTE}


def test_a_connector_that_is_not_ours_is_said(given):
    found = read_file(given({"kv_connector": "NixlConnector"}))
    assert (found.configs, states(found)) == ((), {State.NOTE})


def test_settings_that_are_no_object_are_bad(given):
    found = read_file(given({"kv_connector": "KVFerryConnector", "kv_connector_extra_config": [1]}))
    assert states(found) == {State.BAD}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a JSON list"),
        ("[" * 10**5, "is not JSON"),
        (" " * (1 << 21), "1 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_sentence(given, content, said):
    with pytest.raises(ConfigError, match=said):
        read_file(given(content))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_file(str(tmp_path / "none"))
