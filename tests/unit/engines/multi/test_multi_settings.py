from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.multi.settings import parse_multi

NIXL, OURS = {"kv_connector": "NixlConnector"}, {"kv_connector": "KVFerryConnector"}


def test_entries_are_what_vllms_own_takes_and_get_names_and_weights() -> None:
    settings = parse_multi({"connectors": [NIXL, {**OURS, "load_weight": 2}, OURS, {**OURS, "name": "disk"}]})
    assert [(child.name, child.load_weight) for child in settings.children] == [
        ("NixlConnector", 1.0),
        ("KVFerryConnector", 2.0),
        ("KVFerryConnector-2", 1.0),
        ("disk", 1.0),
    ]
    assert settings.children[3].transfer == OURS
    assert (settings.source_policy, settings.patience_seconds, settings.attempts) == ("weight", 10.0, 2)


def test_a_name_that_is_given_is_not_given_to_another() -> None:
    settings = parse_multi({"connectors": [OURS, {**NIXL, "name": "KVFerryConnector"}]})
    assert [child.name for child in settings.children] == ["KVFerryConnector-2", "KVFerryConnector"]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({}, r"connectors is None; it must be a list of objects"),
        ({"connectors": []}, r"connectors is \[\]"),
        ({"connectors": "NixlConnector"}, r"it must be a list"),
        ({"connectors": [{}]}, r'connectors\[0\] is \{\}; it must be an object whose "kv_connector"'),
        ({"connectors": [NIXL], "policy": "cost"}, r"no key 'policy'; did you mean 'source_policy'\?"),
        ({"connectors": [NIXL], "zzz": 1}, r"no key 'zzz'; known are connectors, source_policy"),
        (
            {"connectors": [OURS, {**NIXL, "kv_rol": "kv_both"}]},
            r"connectors\[1\] \(NixlConnector\) has no key 'kv_rol'; did you mean 'kv_role'\?",
        ),
        ({"connectors": [{**NIXL, "load_weight": -1}]}, r"load_weight is -1, it must be 0 to 1000000"),
        ({"connectors": [{**NIXL, "load_weight": "2"}]}, r"load_weight is '2', it must be a number"),
        ({"connectors": [{**NIXL, "load_weight": True}]}, r"load_weight is True, it must be a number"),
        ({"connectors": [{**NIXL, "name": ""}]}, r"name is '', it must be a text"),
        ({"connectors": [{**NIXL, "name": "a"}, {**OURS, "name": "a"}]}, r"'a' is the name of 2"),
        (
            {"connectors": [NIXL], "source_policy": "best"},
            r"source_policy is 'best'; it must be one of weight, cost, first",
        ),
        ({"connectors": [NIXL], "patience_seconds": 0}, r"patience_seconds is 0(\.0)?, it must be above 0"),
        ({"connectors": [NIXL], "attempts": 17}, r"attempts is 17, it must be 1 to 16"),
    ],
)
def test_unusable_settings_are_refused_in_one_sentence(extra: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_multi(extra)
    assert "\n" not in str(caught.value)
