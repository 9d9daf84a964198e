"""One check of configurations, for `kvferry config`, `kvferry doctor` and engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm import config
from kvferry.engines.vllm.compat.scheduler import defer_frees
from kvferry.engines.vllm.config import keep_transfer, read_settings
from kvferry.engines.vllm.connector import KVFerryConnector
from kvferry.engines.vllm.multi.children import check, children_of
from kvferry.engines.vllm.multi.connector import FerryMultiConnector
from kvferry.engines.vllm.transfer_config import TransferCheck, Verdict
from support.transfer_configs import CORPUS, FERRY, MULTI, mutations


def engine_of(transfer: KVTransferConfig) -> Any:
    return SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(world_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=None,
    )


def start(given: dict[str, Any]) -> None:
    """Do what vLLM and the connectors do with a configuration until the first rank starts."""
    transfer = KVTransferConfig(**given)
    engine, kind = engine_of(transfer), KVConnectorFactory.get_connector_class(transfer)
    if kind is KVFerryConnector:
        read_settings(engine)
    elif kind is FerryMultiConnector:
        children = children_of(engine)
        check(children, engine)
        for child in children:
            if child.is_kvferry:
                read_settings(child.config)
    elif kind is MultiConnector:
        made = MultiConnector._get_connector_classes_and_configs(engine)
        for child, config in made:
            if child is KVFerryConnector:
                read_settings(config)
        handshakes = [child for child, _ in made if "get_handshake_metadata" in vars(child)]
        if KVFerryConnector in handshakes:
            assert handshakes[0] is KVFerryConnector
            assert handshakes.count(KVFerryConnector) == 1


def refused_by_engine(given: dict[str, Any]) -> str:
    try:
        start(given)
    except Exception as error:  # noqa: BLE001 - whatever ends an engine
        return f"{type(error).__name__}: {error}"
    return ""


CASES = [
    pytest.param(given, id=f"{name}, {change}" if change else name)
    for name, whole in CORPUS.items()
    for change, given in (("", whole), *mutations(whole))
]


def test_what_is_accepted_starts_and_what_is_refused_does_not():
    """All in one test: thousands of configurations."""
    wrong, accepted = {}, 0
    for case in CASES:
        (given,) = case.values
        found = TransferCheck(given)
        refusals = [one for one in found.remarks if one.verdict is Verdict.REFUSED]
        if not refusals and not found.configs:
            continue  # nothing of kvferry's
        error = refused_by_engine(given)
        accepted += not refusals
        if bool(refusals) != bool(error):
            wrong[case.id] = error or [one.text for one in refusals]
    assert wrong == {}
    assert 200 < accepted < len(CASES) - 200


@pytest.mark.parametrize("name", CORPUS)
def test_real_configurations_are_accepted(name):
    assert [one for one in TransferCheck(CORPUS[name]).remarks if one.verdict is Verdict.REFUSED] == []


@pytest.mark.parametrize(
    ("release", "verdict"),
    [("0.31.1", Verdict.NOTED), (None, Verdict.NOTED), ("0.32.0", Verdict.REFUSED)],
)
def test_a_key_that_the_installed_vllm_still_takes_is_only_noted(monkeypatch, release, verdict):
    monkeypatch.setattr(config, "vllm_version", lambda: release)
    found = TransferCheck({**FERRY, "kv_ip": "10.0.0.1"}).remarks
    assert [one.verdict for one in found if "'kv_ip'" in one.text] == [verdict]


def test_a_refusal_is_one_sentence_that_says_what_to_do():
    texts = {
        one.text
        for case in CASES
        for one in TransferCheck(case.values[0]).remarks
        if one.verdict is Verdict.REFUSED
    }
    assert len(texts) > 100
    assert [text for text in texts if "\n" in text or not any(mark in text for mark in "?;,")] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_transfer_config": FERRY}, "inside an object with the key 'kv_transfer_config'; give only"),
        ({**FERRY, "kv_ip": "10.0.0.1"}, "key 'kv_ip', which vLLM has dropped and kvferry never used; leave"),
        ({**FERRY, "kv_connector": "KVFerryConector"}, "set it to 'KVFerryConnector'"),
        ({"kv_connector": "KVFerryConector"}, "did you mean 'KVFerryConnector'?"),
        ({**MULTI, "kv_connector": "FerryMulti"}, "set it to 'FerryMultiConnector'"),
        ({key: FERRY[key] for key in FERRY if key != "kv_connector"}, 'set it to "KVFerryConnector"'),
        (
            {**FERRY, "kv_connector_extra_config": {"host": "http://10.0.0.7:8000"}},
            "host is 'http://10.0.0.7:8000'; it must be a host name or IP address",
        ),
        (
            {**FERRY, "kv_connector_extra_config": {"advertise_host": "::"}},
            "set it to the one that peers use",
        ),
        (
            {**FERRY, "kv_connector_extra_config": {"secret_file": ""}},
            "secret_file is '', which names no file",
        ),
    ],
)
def test_a_refusal_names_the_mistake(given, said):
    with pytest.raises(ConfigError) as caught:
        TransferCheck(given).raise_refusal()
    assert said in str(caught.value)


def test_a_key_without_effect_is_noted_and_refused_by_nobody():
    found = TransferCheck({**FERRY, "kv_port": 5600})
    (noted,) = [one.text for one in found.remarks if one.verdict is Verdict.NOTED]
    assert noted.startswith("kv_port is 5600, which kvferry does not use; leave it out, and set port in ")
    found.raise_refusal()


@pytest.mark.parametrize("name", ["OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"])
def test_an_engine_whose_connector_vllms_offloading_replaces_says_so(name):
    """``--kv-offloading-size`` replaces the class, and leaves kvferry's module path."""
    transfer = KVTransferConfig(**{**FERRY, "kv_connector": name})
    with pytest.raises(ConfigError, match="--kv-offloading-size replaces the connector by vLLM's own; leave"):
        KVConnectorFactory.get_connector_class(transfer)


@pytest.mark.parametrize("given", [FERRY, MULTI])
def test_an_engine_with_a_misspelt_connector_says_its_name(given):
    transfer = KVTransferConfig(**{**given, "kv_connector": "kvferry"})
    with pytest.raises(ConfigError, match=f"set it to '{given['kv_connector']}'"):
        KVConnectorFactory.get_connector_class(transfer)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("extra", [{}, {"tiers": "default"}, {"tiers": "default", "transfer": True}])
def test_settings_stay_the_same_when_the_scheduler_changes_the_role(role, extra):
    """In an engine of one process, the worker reads them after the scheduler."""
    transfer = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    engine = engine_of(transfer)
    config = read_settings(engine)
    keep_transfer(engine, config)
    defer_frees(engine)
    assert read_settings(engine) == config
