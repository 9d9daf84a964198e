"""What role, tiers and transfer mean together: to `kvferry config`, to the engine, and to the doctor."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import parse_config
from kvferry.engines.vllm.config import read_settings
from kvferry.engines.vllm.transfer_config import summary
from kvferry.tools.doctor.finding import State
from kvferry.tools.doctor.storage import read_file
from kvferry.tools.serving.kv_config import kv_transfer_config
from kvferry.tools.serving.role import Role

CONTRADICTS = "one side of an exchange with other engines, but transfer is false"
NOTHING = "has nothing to do"

# role, tiers, --transfer / --no-transfer: does it exchange KV, or why is it refused
TABLE = [
    (Role.BOTH, None, None, True),
    (Role.BOTH, None, True, True),
    (Role.BOTH, None, False, NOTHING),
    (Role.BOTH, "default", None, False),
    (Role.BOTH, "default", True, True),
    (Role.BOTH, "default", False, False),
    *(
        (role, tiers, transfer, CONTRADICTS if transfer is False else True)
        for role in (Role.PREFILL, Role.DECODE)
        for tiers in (None, "default")
        for transfer in (None, True, False)
    ),
]
ALLOWED = [row for row in TABLE if not isinstance(row[3], str)]
VLLMS = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def settings(tiers, transfer) -> dict:
    return {key: value for key, value in (("tiers", tiers), ("transfer", transfer)) if value is not None}


def started(config: dict) -> SimpleNamespace:
    """Settings as an engine with this configuration reads them."""
    transfer = SimpleNamespace(**config, kv_buffer_device="cpu")
    device = SimpleNamespace(device_type="cpu")
    return read_settings(SimpleNamespace(kv_transfer_config=transfer, device_config=device))


@pytest.mark.parametrize(("role", "tiers", "transfer", "exchanges"), ALLOWED)
def test_config_engine_and_doctor_agree_on_tiers_and_transfer(role, tiers, transfer, exchanges, tmp_path):
    config = kv_transfer_config(role, settings(tiers, transfer))
    ours = started(config)
    assert (ours.transfers, bool(ours.tiers)) == (exchanges, bool(tiers))
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    found = read_file(str(file))
    assert {one.state for one in found.findings} == {State.OK}
    assert found.configs[0].transfers is exchanges
    assert ("exchanges KV" in summary(found.configs[0])) is exchanges


@pytest.mark.parametrize(("role", "tiers", "transfer", "exchanges"), ALLOWED)
def test_engine_reads_settings_written_by_hand_as_config_writes_them(role, tiers, transfer, exchanges):
    config = {**kv_transfer_config(role), "kv_connector_extra_config": settings(tiers, transfer)}
    assert started(config).transfers is exchanges


@pytest.mark.parametrize(("role", "tiers", "transfer", "why"), [row for row in TABLE if row not in ALLOWED])
def test_contradicting_settings_are_refused_by_config_engine_and_doctor(role, tiers, transfer, why, tmp_path):
    extra = settings(tiers, transfer)
    with pytest.raises(ConfigError, match=why):
        kv_transfer_config(role, extra)
    config = {**kv_transfer_config(role), "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=why):
        started(config)
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    (bad,) = [one for one in read_file(str(file)).findings if one.state is State.BAD]
    assert why in f"{bad.found}; {bad.advice}"


@pytest.mark.parametrize("role", Role)
def test_config_writes_transfer_beside_tiers_for_one_sided_roles(role):
    extra = kv_transfer_config(role, {"tiers": "default"})["kv_connector_extra_config"]
    assert extra == ({"tiers": "default"} | ({} if role is Role.BOTH else {"transfer": True}))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("transfer", [None, False])
def test_role_may_be_that_of_another_connector(role, transfer):
    config = kv_transfer_config(role, settings("default", transfer), alone=False)
    assert config["kv_connector_extra_config"] == settings("default", transfer)
    assert not started({**config, "kv_connector_extra_config": {"tiers": "default", "name": "a"}}).transfers


def test_settings_without_a_role_are_those_of_both():
    assert not parse_config({"tiers": "default"}).transfers
    assert parse_config({"tiers": "default"}, "kv_producer").transfers
