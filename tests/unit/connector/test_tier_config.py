"""The setting `tiers`: every error is one sentence."""

from pathlib import Path

import pytest

from kvferry.common.errors import ConfigError
from kvferry.connector.config import (
    Tiers,
    parse_config,
    read_tiers,
)
from kvferry.tiers.eviction import EVICTION_POLICIES
from kvferry.tiers.files.tier import FileSettings
from kvferry.tiers.host.settings import HostSettings
from kvferry.tiers.objects.settings import ObjectSettings

DOCS = Path(__file__).parents[3] / "docs" / "tiers.md"
OBJECT = {"type": "object", "url": "s3://bucket/kv"}
HOST, FILE = {"type": "host", "capacity": "1GiB"}, {"type": "file", "path": "/chunks"}


@pytest.mark.parametrize("given", [None, []])
def test_an_empty_setting_means_no_tiers(given):
    assert read_tiers(given) is None


def test_default_is_host_memory_and_files():
    assert read_tiers("default") == Tiers(HostSettings(), (FileSettings(),))


def test_tiers_are_read_in_their_order():
    url = {"type": "object", "url": "s3://bucket", "timeout_seconds": 5, "write": "back"}
    assert read_tiers([{**HOST, "eviction_policy": "arc"}, FILE, url]) == Tiers(
        HostSettings("1GiB", "arc"),
        (FileSettings("/chunks"), ObjectSettings("s3://bucket", timeout_seconds=5, write="back")),
    )


def test_chunks_pass_a_small_host_tier_without_a_configured_one():
    assert read_tiers([FILE]) == Tiers(HostSettings(Tiers.STAGING), (FileSettings("/chunks"),))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("host", "tiers is 'host'; it must be \"default\" or a list of objects with a \"type\""),
        (
            ["host"],
            "tiers[0] is 'host'; it must be an object whose \"type\" is one of host, fleet, file, object",
        ),
        ([{"type": "disk"}], "tiers[0] is {'type': 'disk'}; it must be an object whose \"type\" is one of"),
        ([{"type": ["host"]}], "tiers[0] is {'type': ['host']}; it must be an object"),
        ([HOST, {**FILE, "pth": "/"}], "tiers[1] (file) has no key 'pth'; did you mean 'path'?"),
        ([{**HOST, "url": "/"}],
         "tiers[0] (host) has no key 'url'; known are type, capacity, eviction_policy"),
        ([{**HOST, "eviction_policy": "mru"}],
         "tiers[0] (host): eviction_policy is 'mru'; it must be one of lru, arc, s3fifo, density"),
        ([{**HOST, "capacity": 1.5}],
         "tiers[0] (host): capacity is 1.5; it must be a whole number, text or null"),
        ([{**FILE, "durable": "yes"}], "tiers[0] (file): durable is 'yes'; it must be true or false"),
        ([{"type": "object"}],
         "tiers[0] (object) lacks the key 'url', which is required; set it to text"),
        ([{**OBJECT, "options": {"aws_secret_access_key": 1234}}],
         "tiers[0] (object): options.aws_secret_access_key is a whole number; it must be text"),
        ([{**OBJECT, "options": "key=1234"}],
         "tiers[0] (object): options is text; it must be an object"),
        ([HOST, HOST], "tiers names host memory twice; give it once, with the capacity of both"),
        ([FILE, HOST], "tiers: host memory must come first, because every chunk passes through it"),
        ([HOST, *[FILE] * 8], "tiers names 8 tiers besides host memory, at most 7; leave some out"),
        ([FILE, {**FILE, "path": "/tmp/../chunks/"}], "tiers[0] and tiers[1] are both /chunks; name another"),
        ([HOST, {"type": "file"}, FILE, {"type": "file", "capacity": "1GiB"}],
         "tiers[1] and tiers[3] are both the default directory; name another place, or leave out one of"),
        ([OBJECT, {**OBJECT, "url": "s3://bucket/kv/"}], "tiers[0] and tiers[1] are both s3://bucket/kv; "),
        ([{**FILE, "path": ""}], "tiers[0]: path is ''; name a directory, or leave it out for the default"),
        ([{**FILE, "path": "/a\0"}], "tiers[0]: path is '/a\\x00'; name a directory"),
        ([{**HOST, "capacity": 0}], "tiers[0]: capacity is 0, it must be above 0"),
        ([{**FILE, "capacity": -1}], "-1 is not a size; write a number of bytes"),
        ([{**FILE, "capacity": "9" * 20}], "tiers[0]: capacity is larger than 8 EiB, the largest size of a"),
        ([{**FILE, "capacity": "9" * 5000}], "'9999"),
        ([{**FILE, "capacity": "much"}], "'much' is not a size; write a number of bytes"),
        ([{"type": "object", "url": "s3://b", "timeout_seconds": 0}],
         "tiers[0]: timeout_seconds is 0.0, it must be above 0 and below an hour"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_an_error(given, says):
    with pytest.raises(ConfigError) as caught:
        read_tiers(given)
    assert str(caught.value).startswith(says)
    with pytest.raises(ConfigError) as caught:
        parse_config({"tiers": given})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "given",
    [
        [FILE, {**FILE, "path": "/chunks/more"}, {"type": "file"}],
        [OBJECT, {**OBJECT, "url": "s3://bucket/kv2"}],
        [OBJECT, {**OBJECT, "options": {"endpoint": "http://127.0.0.1:9000"}}],  # another server's
    ],
)
def test_different_places_of_one_kind_are_accepted(given):
    assert len(read_tiers(given).slow) == len(given)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_eviction_policy_can_be_configured_and_is_documented(name):
    assert read_tiers([{**HOST, "eviction_policy": name}]).host.eviction_policy == name
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith("| `eviction_policy` |")]
    assert f"`{name}`" in row


@pytest.mark.parametrize(
    ("settings", "transfers"),
    [
        ({}, True),
        ({"tiers": []}, True),
        ({"tiers": "default"}, False),
        ({"tiers": [FILE]}, False),
        ({"tiers": [FILE], "transfer": True}, True),
        ({"transfer": True}, True),
    ],
)
def test_an_engine_with_tiers_uses_peers_only_if_configured(settings, transfers):
    assert parse_config(settings).transfers is transfers


@pytest.mark.parametrize("tiers", [None, []])
def test_an_engine_without_peers_and_tiers_is_refused(tiers):
    with pytest.raises(ConfigError) as caught:
        parse_config({"transfer": False, "tiers": tiers})
    assert str(caught.value) == (
        "transfer is false and there are no tiers, so kvferry has nothing to do; set one of them"
    )
