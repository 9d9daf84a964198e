"""Prometheus itself: it loads the rules, alerts fire when they should, and every query finds its series.

Needs the programs `promtool` and `prometheus` (Debian: apt install prometheus).
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from urllib.parse import urlsplit

import httpx
import pytest

from kvferry.tools.dashboard import dashboard, rules
from kvferry.tools.dashboard.alerts import ALERTS
from kvferry.tools.serving.devices import listen, url_of
from kvferry.tools.top.exposition import parse_page
from kvferry.tools.top.figures import Latency
from support.metrics_page import Page, busy, several, shown
from support.waiting import wait_for

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
with_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")


@with_promtool
def test_the_rules_are_rules(tmp_path):
    (tmp_path / "rules.yaml").write_text(rules())
    done = subprocess.run(
        [PROMTOOL, "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in done.stdout


ENGINE = 'instance="e:1",model_name="m",engine="0"'
STEADY = "0+{}x60"
"""So many more every minute, for an hour."""


def told(name: str, per_minute: int, labels: str = "") -> dict[str, str]:
    inner = f"{ENGINE},{labels}" if labels else ENGINE
    return {"series": f"{name}{{{inner}}}", "values": STEADY.format(per_minute)}


def level(name: str, value: float, labels: str = "") -> dict[str, str]:
    return told(name, 0, labels) | {"values": f"{value}+0x60"}


def loads(outcome: str, n: int) -> dict[str, str]:
    return told("kvferry_loads_total", n, f'source="peer",outcome="{outcome}"')


def ended(outcome: str, n: int) -> dict[str, str]:
    return told("kvferry_leases_ended_total", n, f'outcome="{outcome}"')


def tier(name: str, n: int, labels: str = "") -> dict[str, str]:
    return told(f"kvferry_tier_{name}", n, f'tier="file"{labels}')


def space(used: int, labels: str = "") -> list[dict[str, str]]:
    return [
        level("kvferry_tier_used_bytes", used, f'tier="file"{labels}'),
        level("kvferry_tier_capacity_bytes", 100, f'tier="file"{labels}'),
    ]


PEER = 'source="peer"'
LOCAL = f'{PEER},reason="local",group=""'
DROPPED = ',reason="no space on the device"'
ONE, TWO = ',connector="one"', ',connector="two"'
STORIES = [
    ("KVFerryLoadsFail", [loads("ready", 90), loads("failed", 10)], [loads("ready", 99), loads("failed", 1)]),
    ("KVFerryDeadlinesPass", [loads("expired", 1)], [loads("ready", 9), loads("expired", 0)]),
    ("KVFerryLateBlocks", [level("kvferry_late_blocks", 3)], [level("kvferry_late_blocks", 0)]),
    ("KVFerryLeasesExpire", [ended("released", 9), ended("expired", 1)], [ended("released", 9)]),
    (
        "KVFerryTierDropsStores",
        [tier("stored_chunks_total", 50), tier("dropped_chunks_total", 5, DROPPED)],
        [tier("stored_chunks_total", 50), tier("dropped_chunks_total", 0, DROPPED)],
    ),
    (
        "KVFerryTierFull",
        [*space(97), tier("dropped_chunks_total", 5, DROPPED)],
        [*space(97), tier("dropped_chunks_total", 0, DROPPED)],
    ),
    (
        "KVFerryTierFull",
        # Two connectors of one engine, each with a directory.
        [*space(97, ONE), *space(1, TWO), tier("dropped_chunks_total", 5, f"{DROPPED}{ONE}")],
        [*space(97, ONE), *space(1, TWO), tier("dropped_chunks_total", 5, f"{DROPPED}{TWO}")],
    ),
    (
        "KVFerryNoHits",
        [told("kvferry_queries_total", 10, PEER)],
        [told("kvferry_queries_total", 10, PEER), told("kvferry_hits_total", 1, PEER)],
    ),
    (
        "KVFerryNoHits",
        [told("kvferry_queries_total", 10, PEER), told("kvferry_misses_total", 2, LOCAL)],
        # The engine's own cache had it all.
        [told("kvferry_queries_total", 10, PEER), told("kvferry_misses_total", 10, LOCAL)],
    ),
    (
        "KVFerryTokensRecomputed",
        [told("kvferry_recomputed_tokens_total", 10, PEER), told("vllm:prompt_tokens_total", 100)],
        [told("kvferry_recomputed_tokens_total", 1, PEER), told("vllm:prompt_tokens_total", 100)],
    ),
]  # fmt: skip


@with_promtool
@pytest.mark.parametrize(("name", "bad", "good"), STORIES, ids=[name for name, _, _ in STORIES])
def test_an_alert_fires_when_it_should_and_only_then(tmp_path, name, bad, good):
    [alert] = [each for each in ALERTS if each.name == name]

    def fired(told_series) -> str:
        """What promtool says when it is claimed that nothing fires after most of an hour."""
        (tmp_path / "rules.yaml").write_text(rules())
        asked = [{"eval_time": "55m", "alertname": name, "exp_alerts": []}]
        test = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": told_series, "alert_rule_test": asked}],
        }
        (tmp_path / "test.yaml").write_text(json.dumps(test))
        done = subprocess.run(
            [PROMTOOL, "test", "rules", "test.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    assert "SUCCESS" in fired(good)
    said = fired(bad)
    assert f'alertname="{name}"' in said
    assert f'severity="{alert.severity}"' in said
    assert "e:1 (m, engine 0)" in said
    assert "error" not in said


@pytest.mark.long  # a server reads and evaluates for seconds; test_dashboard checks names and labels
@with_prometheus
def test_every_query_finds_its_series_and_quantiles_agree(tmp_path):
    pages = [Page(), Page()]
    with shown({"/metrics": pages[0].text}) as first, shown({"/metrics": pages[1].text}) as second:
        targets = [urlsplit(url).netloc for url in (first, second)]
        (tmp_path / "rules.yaml").write_text(rules())
        (tmp_path / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {
                        "scrape_interval": "200ms",
                        "scrape_timeout": "200ms",
                        "evaluation_interval": "1s",
                    },
                    "rule_files": ["rules.yaml"],
                    "scrape_configs": [{"job_name": "kvferry", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        with listen("127.0.0.1", 0) as sock:
            url = url_of(sock)
        command = [PROMETHEUS, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--web.listen-address={urlsplit(url).netloc}"],
                cwd=tmp_path,
                stdout=log,
                stderr=log,
            )
        try:
            ask(url, pages)
        finally:
            process.terminate()
            process.wait(20)


def ask(url: str, pages: list[Page]) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        prometheus = Prometheus(client)
        wait_for(lambda: prometheus.has_read(pages))
        for panel in dashboard()["panels"]:
            for target in [t for one in (panel, *panel.get("panels", ())) for t in one.get("targets", ())]:
                found = prometheus.values(target["expr"])
                assert found, (panel["title"], target["expr"])
                assert not any(math.isnan(each) for each in found), (panel["title"], target["expr"])
        assert prometheus.health() == dict.fromkeys((alert.name for alert in ALERTS), "ok")
        # All that the pages count is alike at any time.
        ours = Latency.of(
            parse_page(pages[0].text(), 0.0).engines["0"], "kvferry_load_seconds", source="tiers"
        )
        for q, value in ((0.5, ours.median), (0.99, ours.p99)):
            buckets = "kvferry_load_seconds_bucket{source='tiers'}"
            theirs = prometheus.values(f"histogram_quantile({q}, {buckets})")
            assert theirs == [pytest.approx(value)] * 2


class Prometheus:
    """A server that scrapes."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def values(self, expression: str) -> list[float]:
        """Of an expression, with values in place of Grafana's variables."""
        for variable, value in (
            ("$__rate_interval", "1m"),
            *((f"${v}", ".*") for v in ("instance", "model", "engine")),
        ):
            expression = expression.replace(variable, value)
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def has_read(self, pages: list[Page]) -> bool:
        """All of these, some times, while they went on."""
        for page in pages:
            busy(page)
            several(page)
        try:
            if self._client.get("/-/ready").status_code != 200:
                return False
        except httpx.TransportError:
            return False
        found = self.values("count_over_time(vllm:prompt_tokens_total[1m])")
        return len(found) == len(pages) and min(found) > 5

    def health(self) -> dict[str, str]:
        """Of the rules."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
