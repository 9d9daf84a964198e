"""Values of ``--kv-transfer-config`` with kvferry's connectors, and mutations of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FERRY = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
MULTI = {
    **FERRY,
    "kv_connector": "FerryMultiConnector",
    "kv_connector_module_path": "kvferry.engines.vllm.multi.connector",
}
_HOST = {"type": "host", "capacity": "64MiB"}
_EXTRA = "kv_connector_extra_config"


def _ferry(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {**FERRY, "kv_role": role, _EXTRA: extra}


def _multi(name: dict[str, Any], *children: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**name, _EXTRA: {"connectors": list(children), **extra}}


def _child(**extra: Any) -> dict[str, Any]:
    return {key: FERRY[key] for key in ("kv_connector", "kv_connector_module_path")} | {_EXTRA: extra}


CORPUS: dict[str, dict[str, Any]] = {
    "nothing set": FERRY,
    "prefill on one machine": _ferry("kv_producer"),
    "decode that keeps turns": _ferry("kv_consumer", turn_seconds=600.0, turn_share=0.5),
    "prefill of two machines": _ferry(
        "kv_producer", host="10.0.0.1", port=5600, ports="20000-20999", peers=["10.0.0.0/24", "decode.svc"]
    ),
    "every address of a pod": _ferry("kv_consumer", host="0.0.0.0", advertise_host="10.1.2.3", port=5600),
    "the node's address": _ferry(host="node", lease_seconds=60, load_timeout_seconds=20.0),
    "default tiers": _ferry(tiers="default", chunk_tokens=128, snapshot_tokens=1024),
    "host memory and transfers": _ferry(tiers=[_HOST], transfer=True, source_policy="cost"),
    "host memory and a directory": _ferry(tiers=[_HOST, {"type": "file", "capacity": "1GiB"}]),
    "admin and records": _ferry(tiers=[_HOST], admin={"port": 0}, explain_requests=16, name="kv"),
    "a layout, no staging": _ferry(layout="LBHNC", strategy="direct", staging_mib=0, lanes=1),
    "keys of vLLM's own": {**_ferry(), "engine_id": "prefill-0", "kv_buffer_device": "cpu"},
    "tiers beside NIXL": _multi(MULTI, {"kv_connector": "NixlConnector"}, _child(tiers=[_HOST])),
    "transfers beside vLLM's offloading": _multi(
        MULTI,
        {"kv_connector": "OffloadingConnector", _EXTRA: {"cpu_bytes_to_use": 1 << 26}, "load_weight": 0.5},
        {**_child(), "name": "peers"},
        source_policy="cost",
    ),
    "inside vLLM's MultiConnector": _multi(
        {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", _EXTRA: {"cpu_bytes_to_use": 1 << 26}},
        _ferry(tiers=[_HOST]),
    ),
}
"""Configurations from the documentation, the manifests of `deploy`, and vLLM's own examples."""

_VALUES = (None, "", "wrong", 5, -1, [], {}, [5])
_HOSTS = (
    "http://10.0.0.7",
    "10.0.0.7:5600",
    "10.0.0.0/24",
    "",
    "a b",
    "224.0.0.1",
    "[::]",
    "localhost",
    "::1",
)


def mutations(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (what was changed, the changed configuration)."""
    yield "inside another object", {"kv_transfer_config": given}
    yield "inside another object, as an argument", {"kv-transfer-config": given}
    for key in ("kv_ip", "kv_rank", "kv_parallel_size", "kv_buffer_size"):
        yield f"with {key}", {**given, key: 1}
    yield "with a port that nothing uses", {**given, "kv_port": 5600}
    for name in (
        "KVferryConnector",
        "KVFerryConector",
        "OffloadingConnector",
        "FerryMultiConnector",
        "Other",
    ):
        yield f"named {name}", {**given, "kv_connector": name}
    yield "in another module", {**given, "kv_connector_module_path": "kvferry.engines.vllm.plugin"}
    yield from _changed(given)
    extra = given.get(_EXTRA, {})
    for text, one in _changed(extra):
        yield f"extra: {text}", {**given, _EXTRA: one}
    for host in _HOSTS:
        for key in ("host", "advertise_host") if "connectors" not in extra else ():
            yield f"{key} {host!r}", {**given, _EXTRA: {**extra, key: host}}
    for number, child in enumerate(extra.get("connectors", ())):
        if "module_path" in " ".join(child):
            for text, one in mutations(child):
                children = [*extra["connectors"][:number], one, *extra["connectors"][number + 1 :]]
                yield f"child: {text}", {**given, _EXTRA: {**extra, "connectors": children}}
            yield "twice", {**given, _EXTRA: {**extra, "connectors": [*extra["connectors"], child]}}
    if "connectors" in extra:
        yield "reversed", {**given, _EXTRA: {**extra, "connectors": extra["connectors"][::-1]}}


def _changed(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, whole in given.items():
        without = {each: value for each, value in given.items() if each != key}
        yield f"without {key}", without
        yield f"misspelt {key}", {**without, key[:-1]: whole}
        for value in _VALUES:
            yield f"{key} {value!r}", {**given, key: value}
