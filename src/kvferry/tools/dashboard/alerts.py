"""Prometheus alerts: when they fire, and what the operator should do."""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvferry.observe import CONNECTOR
from kvferry.tools.dashboard.panels import ENGINE, INSTANCE, increase, minus, per_second, series, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A Prometheus alert, with advice to the operator."""

    name: str
    expression: str  # PromQL condition, with one result for each affected engine, source or tier
    lasts: str  # time for which the condition must hold before the alert fires, such as ``10m``
    summary: str  # description of the problem, as a Prometheus template that refers to labels
    action: str
    # ``critical`` if nothing is served, ``warning`` for a problem to look at today, ``info`` for a possible
    # improvement.
    severity: str = "warning"


_SOURCE = (*ENGINE, "source")
_ROUTER = (INSTANCE,)
_TIER = (*ENGINE, CONNECTOR, "tier")
_WHO = "{{ $labels.instance }} ({{ $labels.model_name }}, engine {{ $labels.engine }})"
_WHICH = "Tier {{ $labels.tier }}{{ with $labels.connector }} of {{ . }}{{ end }}"
_STATE = "kvferry_router_engine_state"
_SHARE = "{{ $value | humanizePercentage }}"


def _rate(name: str, by: tuple[str, ...], **where: str) -> str:
    return total(per_second(series(name, None, **where), "10m"), *by)


def _increase(name: str, by: tuple[str, ...], over: str, **where: str) -> str:
    return total(increase(series(name, None, **where), over), *by)


_FAILED = _rate("kvferry_loads_total", _SOURCE, outcome="failed")
_LOADED = _rate("kvferry_loads_total", _SOURCE)
_RECOMPUTED = _rate("kvferry_recomputed_tokens_total", ENGINE)
_PROMPTS = _rate("vllm:prompt_tokens_total", ENGINE)
# Exclude host memory. It is normally full, and its count of dropped chunks includes failed fetches.
_SLOW = "!host"
_USED = total(series("kvferry_tier_used_bytes", tier=_SLOW), *_TIER)
_CAPACITY = total(series("kvferry_tier_capacity_bytes", tier=_SLOW), *_TIER)
_STORED = _rate("kvferry_tier_stored_chunks_total", _TIER, tier=_SLOW)
_DROPPED = _rate("kvferry_tier_dropped_chunks_total", _TIER, tier=_SLOW)
# A miss because the engine had all tokens itself is no question to the source.
_LOOKED = minus(
    _increase("kvferry_queries_total", _SOURCE, "30m"),
    _increase("kvferry_misses_total", _SOURCE, "30m", reason="local"),
)

# Requests that a decode engine has answered, with a prefill engine or alone.
_SERVED = _rate("kvferry_router_requests_total", _ROUTER, outcome="split|decode")

ALERTS = (
    Alert(
        name="KVFerryNoDecodeEngine",
        expression=f"{total(series(_STATE, state='up|resting', role='decode'), *_ROUTER)} == 0",
        lasts="1m",
        severity="critical",
        summary="Router {{ $labels.instance }} finds no decode engine: it answers no request",
        action="kvferry_router_engine_state has the state of each engine, and /health of the router says why "
        "it is down.",
    ),
    Alert(
        name="KVFerryEngineDown",
        expression=f"{total(series(_STATE, state='down'), *_ROUTER, 'role', 'url')} > 0",
        lasts="5m",
        summary="The {{ $labels.role }} engine {{ $labels.url }} is down for router {{ $labels.instance }}",
        action="Its requests go to other engines, so the service is degraded. /health of the router says why "
        "it is down: its process has ended, it does not answer probes, or the network between them.",
    ),
    Alert(
        name="KVFerryRouterFails",
        expression=f"{_rate('kvferry_router_requests_total', _ROUTER, outcome='failed', reason='5..|broken')}"
        f" / {_rate('kvferry_router_requests_total', _ROUTER)} > 0.05",
        lasts="5m",
        summary=f"{_SHARE} of the requests to router {{{{ $labels.instance }}}} fail",
        action="kvferry_router_requests_total has the reasons, and the router's log names the engines.",
    ),
    Alert(
        name="KVFerryPrefillGivesNoKV",
        expression=f"{_rate('kvferry_router_requests_total', _ROUTER, reason='no_kv|engine_failed')}"
        f" / {_SERVED} > 0.1",
        lasts="10m",
        summary=f"{_SHARE} of the requests to router {{{{ $labels.instance }}}} get no KV of a prefill "
        "engine",
        action="Decode engines compute these prompts, so answers are correct but slower. Likely causes: "
        "prefill engines are down, full or drained. Their logs say why they offer nothing.",
    ),
    Alert(
        name="KVFerryLoadsFail",
        expression=f"{_FAILED} / {_LOADED} > 0.05",
        lasts="10m",
        summary=f"{_SHARE} of the loads from {{{{ $labels.source }}}} fail on {_WHO}",
        action="The prompts are computed instead, so answers are correct but slower. The engine's log names "
        "each failure. kvferry_misses_total has the reasons: checksum points to a disk (kvferry cache "
        "verify), or of source peer to a network or memory, and refused to a peer.",
    ),
    Alert(
        name="KVFerryDeadlinesPass",
        expression=f"{_increase('kvferry_loads_total', _SOURCE, '10m', outcome='expired')} > 2",
        lasts="2m",
        summary=f"Loads from {{{{ $labels.source }}}} exceed their deadline on {_WHO}: "
        "{{ $value | humanize }} in ten minutes",
        action="Each delayed a request by load_timeout_seconds. Look at kvferry_transfer_seconds by stage, "
        "and at kvferry_tier_fetch_seconds. Likely causes: a hung mount, a dead peer, a saturated network.",
    ),
    Alert(
        name="KVFerryLateBlocks",
        expression=f"{total(series('kvferry_late_blocks'), *ENGINE)} > 0",
        lasts="15m",
        summary=f"{{{{ $value }}}} blocks of {_WHO} are held by reads that should have ended long ago",
        action="The blocks become free when the reads end. If they reach the limit late_blocks, the engine "
        "refuses that peer. If the peer's process is suspended or hangs, end it.",
    ),
    Alert(
        name="KVFerryLeasesExpire",
        expression=f"{_rate('kvferry_leases_ended_total', ENGINE, outcome='expired')}"
        f" / {_rate('kvferry_leases_ended_total', ENGINE)} > 0.05",
        lasts="10m",
        summary=f"{_SHARE} of the prompts that {_WHO} prepared are never read",
        action="Each keeps its blocks for up to lease_seconds. Check that the router sends both halves of "
        "each request, and that decode engines can reach this engine's control channel.",
    ),
    Alert(
        name="KVFerryTierDropsStores",
        expression=f"{_DROPPED} / ({_DROPPED} + {_STORED}) > 0.01",
        lasts="15m",
        summary=f"{_WHICH} on {_WHO} drops {_SHARE} of the chunks to store",
        action="Later requests will miss them. kvferry_tier_dropped_chunks_total has the reasons. Likely "
        "causes: the tier is slower than the stores, host memory is too small to hold chunks until they are "
        "written, or other programs fill the disk.",
    ),
    Alert(
        name="KVFerryTierFull",
        expression=f"{_USED} / {_CAPACITY} > 0.95 and {_DROPPED} > 0",
        lasts="15m",
        summary=f"{_WHICH} on {_WHO} is {_SHARE} full and drops stores",
        action="Eviction should make room. Look at kvferry_tier_dropped_chunks_total by reason, the log, and "
        "the free space of the disk (kvferry cache stat). The capacity may exceed what the disk has left.",
    ),
    Alert(
        name="KVFerryNoHits",
        expression=f"{_LOOKED} > 100 unless {_increase('kvferry_hits_total', _SOURCE, '30m')} > 0",
        lasts="15m",
        severity="info",
        summary=f"No hits from {{{{ $labels.source }}}} on {_WHO} in {{{{ $value | humanize }}}} queries",
        action="topk(5, sum by (reason, group) (rate(kvferry_misses_total[30m]))) shows why. docs/metrics.md "
        "says what to do about each reason.",
    ),
    Alert(
        name="KVFerryTokensRecomputed",
        expression=f"{_RECOMPUTED} / {_PROMPTS} > 0.05",
        lasts="10m",
        summary=f"{_SHARE} of the prompt tokens on {_WHO} are computed because their load failed",
        action="These requests wait for the load and then for the prefill. Find out why loads fail "
        "(kvferry_loads_total by outcome). Until then, a shorter load_timeout_seconds reduces the wait.",
    ),
)


def rules() -> str:
    """Return a Prometheus rule file with all alerts, as YAML."""
    lines = ["groups:", "  - name: kvferry", "    rules:"]
    for alert in ALERTS:
        # A string quoted as JSON is also valid YAML.
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"
