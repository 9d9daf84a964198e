"""The connector's settings. Unusable ones are refused in one sentence."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import ConfigError
from kvferry.connector.config import ConnectorConfig, parse_config
from kvferry.engines.vllm.config import read_settings
from kvferry.keys.tenant import NOBODY, tenant_of
from kvferry.tiers.tenants import Tenant, Tenants
from support.examples import examples


def test_no_settings_give_the_defaults():
    assert parse_config({}) == ConnectorConfig()


def test_settings_replace_the_defaults():
    config = parse_config({"port": 5600, "lease_seconds": 12, "secret_file": "/s", "host_buffer": True})
    assert (config.port, config.lease_seconds, config.secret_file, config.host_buffer) == (
        5600,
        12,
        "/s",
        True,
    )


@pytest.mark.parametrize(
    ("key", "near"),
    [("prot", "port"), ("lease_second", "lease_seconds"), ("load_timeout", "load_timeout_seconds"),
     ("secretfile", "secret_file"), ("Attempts", "attempts"), ("lay_out", "layout"),
     ("latebloks", "late_blocks")],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, near):
    with pytest.raises(ConfigError) as caught:
        parse_config({key: 1})
    assert str(caught.value) == f"kv_connector_extra_config has no key {key!r}; did you mean {near!r}?"


def test_an_unknown_key_of_the_admin_api_is_refused_with_the_nearest_known_one():
    with pytest.raises(ConfigError) as caught:
        parse_config({"admin": {"prt": 1}})
    assert str(caught.value) == "admin has no key 'prt'; did you mean 'port'?"


def test_a_key_like_no_other_is_refused_with_all_known_ones():
    with pytest.raises(ConfigError, match=r"has no key 'zzz'; known are host, port, ports, advertise_host"):
        parse_config({"zzz": 1})


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"port": "5600"}, "port is '5600'; it must be a whole number"),
        ({"port": 1.5}, "port is 1.5; it must be a whole number"),
        ({"lease_seconds": None}, "lease_seconds is null; it must be a number, or left out"),
        ({"peers": "10.0.0.1"}, "peers is '10.0.0.1'; it must be a list or null"),
        ({"peers": ["10.0.0.1/8"]}, "peers[0] is '10.0.0.1/8', an address within a network"),
        ({"peers": [1]}, "peers[0] is 1; it must be text"),
        ({"lease_seconds": 10**400}, "lease_seconds is a number of too many digits; write a smaller one"),
        ({"admin": 5}, "admin is 5; it must be an object or null"),
        ({"admin": {}}, "admin lacks the key 'port', which is required; set it to a whole number"),
        ({"admin": {"port": "1"}}, "admin.port is '1'; it must be a whole number"),
        ({"admin": {"port": None}}, "admin.port is null; it must be a whole number"),
        ({"admin": {"port": 1, "host": None}}, "admin.host is null; it must be text, or left out"),
        ({"whole_blocks": 1}, "whole_blocks is 1; it must be true or false"),
        ({"host": ["127.0.0.1"]}, "host is a list; it must be text"),
        ({"layout": "NHD"}, "layout is 'NHD'; it must be one of auto, engine, LBNHC, LBHNC, LHBNC,"),
        (
            {"strategy": "fast"},
            "strategy is 'fast'; it must be one of auto, direct, over-read, staged, shared",
        ),
        ({"lanes": 0}, "lanes is 0; it must be 1 to 16"),
        ({"staging_mib": -1}, "staging_mib is -1; it must be 0 to 65536"),
        ({"layout": None}, "layout is null; it must be one of auto, engine, LBNHC"),
        ({"source_policy": "best"}, "source_policy is 'best'; it must be one of weight, cost, first"),
        ({"load_weight": -1}, "load_weight is -1; it must be 0 to 1000000"),
        ({"load_weight": math.nan}, "load_weight is NaN; it must be 0 to 1000000"),
        ({"explain_requests": -1}, "explain_requests is -1; it must be 0 to 100000"),
        ({"patience_seconds": 0}, "patience_seconds is 0; it must be above 0 and below 86400"),
        (
            {"tiers": [{"type": "host"}, {"type": "file", "load_weight": -2}]},
            "tiers[1]: load_weight is -2.0, it must be 0 to 1000000",
        ),
        ({"port": 70000}, "port is 70000; it must be 0 to 65535"),
        ({"port": -1}, "port is -1; it must be 0 to 65535"),
        ({"lease_seconds": 0}, "lease_seconds is 0; it must be above 0 and below 86400"),
        ({"handshake_seconds": -1}, "handshake_seconds is -1; it must be above 0"),
        ({"load_timeout_seconds": math.inf}, "load_timeout_seconds is Infinity; it must be above 0"),
        ({"load_timeout_seconds": math.nan}, "load_timeout_seconds is NaN; it must be above 0"),
        ({"tier_loads": 0}, "tier_loads is 0; it must be 1 to 10000"),
        ({"attempts": 0}, "attempts is 0; it must be 1 to 16"),
        ({"attempts": 17}, "attempts is 17; it must be 1 to 16"),
        ({"late_blocks": 0}, "late_blocks is 0; it must be above 0 and at most 1"),
        ({"turn_seconds": -1}, "turn_seconds is -1; it must be at least 0 and below 86400"),
        ({"turn_share": 0}, "turn_share is 0; it must be above 0 and at most 1"),
        ({"turn_seconds": 60, "transfer": False, "tiers": "default"}, "no KV is exchanged with"),
        (
            {"verify_transfers": True, "transfer": False, "tiers": "default"},
            "verify_transfers is set, but no KV",
        ),
        (
            {"verify_transfers": True, "staging_mib": 0},
            "so peers cannot ask this engine's workers for digests",
        ),
        ({"tenants": {"a b": {}}}, "a tenant's name is 'a b'; it must be 1 to 64 letters"),
        ({"tenants": {"a": {"weight": 0}}}, "weight is 0; it must be 1 to 10000"),
        ({"tenants": {"a": {"limit": 0}}}, "limit is 0; it must be above 0 and at most 1"),
        ({"tenants": {"a": {}, "b": {}}}, "tenants: a and b are the same tenant"),
        (
            {"tenants": {"a": {"adapter": "x", "salt_digest": "00" * 6}}},
            "requests with a salt belong to the tenant of the salt",
        ),
        ({"tenants": {"others": {"adapter": "x"}}}, "tenants: others stands for all tenants that"),
        ({"late_blocks": 1.1}, "late_blocks is 1.1; it must be above 0 and at most 1"),
        ({"host": "0.0.0.0"}, "host is 0.0.0.0, every address of this machine; set advertise_host"),
        ({"host": "::"}, "host is ::, every address of this machine; set advertise_host"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_used_is_refused_by_name(extra, says):
    with pytest.raises(ConfigError) as caught:
        parse_config(extra)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_salt_in_place_of_its_digest_is_not_repeated():
    with pytest.raises(ConfigError, match="the salt_digest of acme must be 12 hex digits") as caught:
        parse_config({"tenants": {"acme": {"salt_digest": "a secret"}}})
    assert "a secret" not in str(caught.value)


def test_tenants_are_found_by_salt_by_adapter_and_by_neither():
    digest = tenant_of("salt", None).hex()
    found = parse_config(
        {
            "tenants": {
                "acme": {"salt_digest": digest, "weight": 3},
                "sql": {"adapter": "sql-lora", "limit": 0.5},
                "nobody": {"weight": 2},
                "others": {"weight": 4},
            }
        }
    ).weighted_tenants()
    assert found is not None
    assert found.of(tenant_of("salt", "sql-lora")) == Tenant("acme", 3)
    assert found.of(tenant_of(None, "sql-lora")) == Tenant("sql", 1, 0.5)
    assert found.of(NOBODY) == Tenant("nobody", 2)
    assert found.of(tenant_of("other", None)) == Tenant("others", 4)
    assert found.labels == ("acme", "sql", "nobody", "others")
    assert parse_config({}).weighted_tenants() is None


def test_a_limit_below_one_chunk_is_refused():
    tenants = Tenants({}, Tenant("others", limit=0.01))
    tenants.check_limits("host", 10_000, 100)
    with pytest.raises(ConfigError, match=r"the limit of others is 0\.01 of the host tier"):
        tenants.check_limits("host", 9_999, 100)


def test_a_value_that_python_cannot_print_is_named_by_its_type():
    with pytest.raises(ConfigError, match="host is a whole number; it must be text"):
        parse_config({"host": 10**5000})


HALF = json.loads('"a\\ud800"')
"""As a file of settings may have it."""


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"layout": HALF}, "layout is 'a\\ud800', expected text: it has half of a surrogate pair at 1"),
        ({"host": HALF}, "host is 'a\\ud800', expected text"),
        (
            {"tiers": [{"type": "host", "eviction_policy": HALF}]},
            "tiers[0]: eviction_policy is 'a\\ud800', expected text",
        ),
        (
            {"tiers": [{"type": "object", "url": "s3://a", "options": {HALF: 1}}]},
            "a key of tiers[0]: options is",
        ),
    ],
    ids=ascii,
)
def test_half_a_surrogate_pair_is_refused_by_name(extra, says):
    with pytest.raises(ConfigError) as caught:
        parse_config(extra)
    assert says in str(caught.value)
    str(caught.value).encode()


def test_listening_on_every_address_needs_an_advertised_one():
    assert parse_config({"host": "0.0.0.0", "advertise_host": "10.0.0.7"}).advertise_host == "10.0.0.7"


def test_a_node_is_the_machine_that_a_rank_runs_on(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    transfer = SimpleNamespace(
        kv_connector_extra_config={"host": "node"},
        kv_load_failure_policy="recompute",
        kv_buffer_device="cpu",
        kv_role="kv_both",
    )
    vllm_config = SimpleNamespace(
        kv_transfer_config=transfer, device_config=SimpleNamespace(device_type="cpu")
    )
    assert read_settings(vllm_config).host == "10.1.2.3"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.text(max_size=3), inside, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(ConnectorConfig.__struct_fields__) | st.text(max_size=8)


@examples(200)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_settings_parse_or_raise_a_config_error(extra):
    try:
        assert isinstance(parse_config(extra), ConnectorConfig)
    except ConfigError:
        return


@pytest.mark.parametrize(("extra", "device"), [({"host_buffer": True}, "cpu"), ({}, "cuda")])
@pytest.mark.parametrize(
    "beside",
    [{"tiers": [{"type": "host", "capacity": "1GiB"}]}, {"turn_seconds": 60}],
    ids=lambda one: next(iter(one)),
)
def test_tiers_and_turns_are_refused_with_a_host_buffer(extra, device, beside):
    """Chunks would be copied to and from the buffer; answers are never copied to it."""
    transfer = SimpleNamespace(
        kv_connector_extra_config={**beside, **extra},
        kv_load_failure_policy="recompute",
        kv_buffer_device="cpu",
        kv_role="kv_both",
    )
    engine = SimpleNamespace(kv_transfer_config=transfer, device_config=SimpleNamespace(device_type=device))
    with pytest.raises(ConfigError, match=f"{next(iter(beside))} .* host buffer"):
        read_settings(engine)
