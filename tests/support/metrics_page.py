"""`/metrics` pages made from the project's own definitions, without engines, on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.observe.metrics import (
    COMMON,
    EXPOSED,
    METRICS,
    MULTI,
    SECONDS,
    VLLM_PREFIX,
    Metric,
    MetricKind,
    MetricsDelta,
    exposed_name,
)

_OF = {**METRICS, **MULTI}


class Page:
    """What an API server shows."""

    def __init__(self, model: str = "tiny", started: float = 1000.0, engines: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {name: self._made(name, metric) for name, metric in EXPOSED.items()}
        self._labels = {number: (model, str(number)) for number in range(engines)}
        self.started = Gauge("process_start_time_seconds", "s", registry=self._registry)
        self.started.set(started)

    def _made(self, name: str, metric: Metric) -> Any:
        of = {"labelnames": [*COMMON, *metric.labels], "registry": self._registry}
        if metric.kind is MetricKind.HISTOGRAM:
            return Histogram(name, metric.help_text, buckets=SECONDS, **of)
        return (Counter if metric.kind is MetricKind.COUNTER else Gauge)(name, metric.help_text, **of)

    def vllm(self, name: str, *labels: str, engine: int = 0) -> Any:
        """A metric of vLLM's, as on the page."""
        return self._metrics[f"{VLLM_PREFIX}{name}"].labels(*self._labels[engine], *labels)

    def count(self, counted: MetricsDelta, engine: int = 0) -> None:
        """Add what an engine has counted."""
        own = self._labels[engine]
        for (name, labels), n in counted.counters.items():
            self._metrics[exposed_name(_OF[name])].labels(*own, *labels).inc(n)
        for (name, labels), value in counted.gauges.items():
            self._metrics[exposed_name(_OF[name])].labels(*own, *labels).set(value)
        for (name, labels), seen in counted.samples.items():
            for each in seen:
                self._metrics[exposed_name(_OF[name])].labels(*own, *labels).observe(each)

    def text(self) -> str:
        """The page."""
        return generate_latest(self._registry).decode()


@contextmanager
def shown(pages: dict[str, Any], port: int = 0) -> Iterator[str]:
    """Texts by path, or what makes them, for as long as the block runs; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = pages.get(self.path)
            body = (found() if callable(found) else found or "").encode()
            self.send_response(200 if found is not None else 404)
            with suppress(ConnectionError):  # the client has gone
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def busy(page: Page, times: int = 1, engine: int = 0) -> None:
    """Count something of every metric, `times` times. Observations are fewer, because each takes time."""
    observations = times.bit_length()
    counted = MetricsDelta()
    counted.count("queries", "peer", by=10 * times)
    counted.count("queries", "tiers", by=8 * times)
    counted.count("hits", "peer", by=6 * times)
    counted.count("hits", "tiers", by=3 * times)
    counted.count("hit_tokens", "peer", "peer", by=600 * times)
    counted.count("hit_tokens", "tiers", "host", by=200 * times)
    counted.count("hit_tokens", "tiers", "file", by=100 * times)
    counted.count("misses", "peer", "looking", "", by=2 * times)
    counted.count("misses", "peer", "local", "", by=2 * times)
    counted.count("misses", "tiers", "not_stored", "1 sliding_window(64)", by=5 * times)
    counted.count("tickets", "hit", by=6 * times)
    counted.set("pending_loads", "peer", to=2)
    counted.count("loads", "peer", "ready", by=6 * times)
    counted.count("loads", "peer", "failed", by=times)
    counted.count("loads", "peer", "expired", by=times)
    counted.count("load_bytes", "peer", "0 full_attention", "direct", by=(12 << 20) * times)
    counted.count("load_bytes", "tiers", "0 full_attention", "copied", by=(4 << 20) * times)
    counted.sample("load_seconds", "peer", of=[0.02] * 6 * observations)
    counted.sample("load_seconds", "tiers", of=[0.2] * 3 * observations)
    for stage, seconds in (("plan", 0.0002), ("read", 0.015), ("check", 0.0004)):
        counted.sample("transfer_seconds", stage, of=[seconds] * 6 * observations)
    counted.count("transfer_pages", by=120 * times)
    counted.count("transfer_descriptors", by=12 * times)
    for tier, used, capacity in (("host", 3 << 30, 8 << 30), ("file", 9 << 30, 10 << 30)):
        counted.set("tier_used_bytes", tier, to=used)
        counted.set("tier_capacity_bytes", tier, to=capacity)
        counted.count("tier_fetched_chunks", tier, by=30 * times)
        counted.count("tier_stored_chunks", tier, by=20 * times)
        counted.count("tier_stored_bytes", tier, by=(20 << 20) * times)
        counted.count("tier_evicted_chunks", tier, by=5 * times)
        counted.sample("tier_fetch_seconds", tier, of=[0.003] * 30 * observations)
        counted.sample("tier_store_seconds", tier, of=[0.004] * 20 * observations)
    _use_by_tenants(counted, times)
    counted.set("tier_owed_chunks", "file", to=7)
    for what, why, number in (
        ("dropped", "no space on the device", 2),
        ("declined", "too few uses", 8),
        ("missed", "corrupt", 1),
    ):
        counted.count(f"tier_{what}_chunks", "file", why, by=number * times)
    counted.count("recomputed_tokens", "peer", by=40 * times)
    for name, level in (("late_blocks", 3), ("leases", 4)):
        counted.set(name, to=level)
    counted.count("leases_granted", by=9 * times)
    counted.count("leases_ended", "released", by=7 * times)
    counted.count("leases_ended", "expired", by=times)
    page.count(counted, engine)
    page.vllm("prompt_tokens_total", engine=engine).inc(1500 * times)
    for source, n in (("local_compute", 300), ("local_cache_hit", 300), ("external_kv_transfer", 900)):
        page.vllm("prompt_tokens_by_source_total", source, engine=engine).inc(n * times)
    page.vllm("generation_tokens_total", engine=engine).inc(50 * times)
    for _ in range(observations):
        page.vllm("time_to_first_token_seconds", engine=engine).observe(0.04)
    page.vllm("num_requests_running", engine=engine).set(5)
    page.vllm("num_requests_waiting", engine=engine).set(1)
    page.vllm("kv_cache_usage_perc", engine=engine).set(0.45)


def _use_by_tenants(counted: MetricsDelta, times: int) -> None:
    for tenant, share in (("acme", 3), ("others", 1)):
        counted.count("tenant_prompt_tokens", tenant, by=100 * share * times)
        counted.count("tenant_hit_tokens", tenant, "host", by=40 * share * times)
        counted.count("tenant_evicted_chunks", "host", tenant, by=times)
        counted.set("tenant_used_bytes", "host", tenant, to=share << 29)
        counted.set("tenant_used_bytes", "file", tenant, to=share << 30)


def several(page: Page) -> None:
    """The like of two connectors in one engine: the first is kvferry's, the other is not."""
    counted = MetricsDelta()
    for name, hits, passed_over, misses, failed in (("memory", 3, 1, 6, 0), ("nixl", 5, 0, 5, 2)):
        counted.count("multi_queries", name, by=10)
        counted.count("multi_hits", name, by=hits)
        counted.count("multi_hit_tokens", name, by=100 * hits)
        counted.count("multi_passed_over", name, by=passed_over)
        counted.count("multi_misses", name, by=misses)
        counted.count("multi_loads", name, "ready", by=hits - failed)
        counted.count("multi_loads", name, "failed", by=failed)
        counted.set("multi_pending_loads", name, to=hits - 2)
    page.count(counted)
