"""The router's own metrics, in a registry of their own, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.observe import ROUTER_PREFIX
from kvferry.tools.serving.router.backends import Backend, BackendState

# Of `RouterMetrics.page`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds: from a router's own overhead to answers of thousands of tokens.
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Outcome(StrEnum):
    """The end of a request, as a value of the label ``outcome``."""

    SPLIT = "split"
    DECODE = "decode"
    PASSED = "passed"
    FAILED = "failed"
    LEFT = "left"


class AloneReason(StrEnum):
    """Reason why a completion goes to a decode engine alone, as a value of the label ``reason``."""

    ENDPOINT = "endpoint"
    BOTH = "both"
    KV_PARAMS = "kv_params"
    PROMPTS = "prompts"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    PROMPT_EMBEDS = "prompt_embeds"
    NO_TOKENS = "no_tokens"
    INVALID = "invalid"
    SHORT = "short"
    KNOWN = "known"
    REFUSED = "refused"
    NO_KV = "no_kv"
    ENGINE_FAILED = "engine_failed"


@dataclass(slots=True)
class RequestRecord:
    """The facts about one request that the metrics count when the request has ended."""

    # Monotonic seconds when the request's headers had arrived.
    begun: float = field(default_factory=time.monotonic)
    # Monotonic seconds when the first part of the answer's body was sent; None before.
    first_byte: float | None = None
    # Time until a prefill engine had answered with success; None if none has.
    prefill_seconds: float | None = None
    split: bool = False  # True if the decode engine was given KV of a prefill engine
    alone: AloneReason | None = None
    status: int | None = None  # HTTP status of the answer; None if nothing was sent
    complete: bool = False  # True once the last part of the answer was sent
    broken: bool = False  # True if the answer ended with an error event
    continued: bool = False  # True if another decode engine has gone on with the stream
    hinted: bool = False  # True if an engine was told which others have a prefix of the prompt
    received_bytes: int = 0
    sent_bytes: int = 0

    def note_decode(self, alone: AloneReason | None) -> None:
        """Record why a decode engine computes the prompt; None if it gets KV of a prefill engine."""
        self.split, self.alone = alone is None, alone

    def note_ticket_lost(self) -> None:
        """Record that a decode engine failed that may have read the KV, so that the next one gets none."""
        if self.split:
            self.note_decode(AloneReason.ENGINE_FAILED)

    def result(self) -> tuple[Outcome, str]:
        """Return the values of the labels ``outcome`` and ``reason``."""
        if self.broken:
            return Outcome.FAILED, "broken"
        if not self.complete or self.status is None:
            return Outcome.LEFT, ""
        if self.status >= 400:
            return Outcome.FAILED, str(self.status)
        if self.alone is not None:
            return Outcome.DECODE, self.alone
        return (Outcome.SPLIT if self.split else Outcome.PASSED), ""


class FollowedRank(NamedTuple):
    """A data-parallel rank of an engine whose KV events the router follows."""

    url: str
    rank: int
    address: str | None  # address at which other engines read its host memory; None if unknown
    blocks: int  # number of its blocks that are known
    gaps: int  # number of times that events were lost


class RouterMetrics:
    """The metrics of one router, which read the engines' states at each scrape."""

    def __init__(
        self, backends: Callable[[], Iterable[Backend]], followed: Iterable[FollowedRank] = ()
    ) -> None:
        """Count from now on. `followed` yields what KV events tell at the moment."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            f"{ROUTER_PREFIX}requests", "Requests that have ended.", ("outcome", "reason"), registry=registry
        )
        self._active = Gauge(f"{ROUTER_PREFIX}active_requests", "Requests under way.", registry=registry)
        self._first_byte = self._histogram("first_byte", "Time to the first byte of a good answer's body.")
        self._total = self._histogram("request", "Time of requests with a good answer, to its last byte.")
        self._prefill = self._histogram("prefill", "Time until a prefill engine has answered.")
        self._continued = Counter(
            f"{ROUTER_PREFIX}continued_streams",
            "Streams of failed decode engines that another one has gone on with.",
            registry=registry,
        )
        self._hinted = Counter(
            f"{ROUTER_PREFIX}hinted_requests",
            "Requests whose engine was told which others have a prefix of the prompt.",
            registry=registry,
        )
        self._received = self._bytes("received", "Bytes of request bodies from callers.")
        self._sent = self._bytes("sent", "Bytes of answers' bodies to callers.")
        registry.register(_EngineCollector(backends, followed))
        ProcessCollector(registry=registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        full = f"{ROUTER_PREFIX}{name}_seconds"
        return Histogram(full, text, buckets=_REQUEST_BUCKETS, registry=self._registry)

    def _bytes(self, name: str, text: str) -> Counter:
        return Counter(f"{ROUTER_PREFIX}{name}_bytes", text, registry=self._registry)

    def begin(self) -> None:
        self._active.inc()

    def end(self, record: RequestRecord) -> None:
        self._active.dec()
        outcome, reason = record.result()
        self._requests.labels(outcome, reason).inc()
        self._received.inc(record.received_bytes)
        self._sent.inc(record.sent_bytes)
        self._continued.inc(record.continued)
        self._hinted.inc(record.hinted)
        # Also of requests that failed later: the prefill engine has done its work.
        if record.prefill_seconds is not None:
            self._prefill.observe(record.prefill_seconds)
        # Failures are often quick, and would make the router look fast.
        if outcome not in (Outcome.FAILED, Outcome.LEFT):
            self._total.observe(time.monotonic() - record.begun)
            if record.first_byte is not None:
                self._first_byte.observe(record.first_byte - record.begun)

    def count_unauthorized(self) -> None:
        """Count a request without a valid key, which `RouterEndpoint` never sees."""
        self._requests.labels(Outcome.FAILED, "401").inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, backends: Callable[[], Iterable[Backend]], followed: Iterable[FollowedRank]) -> None:
        self._backends, self._followed = backends, followed

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            f"{ROUTER_PREFIX}engine_state",
            "1 for the state that the engine is in, 0 for the others.",
            labels=("role", "url", "state"),
        )
        requests = GaugeMetricFamily(
            f"{ROUTER_PREFIX}engine_requests",
            "Requests that the engine works on for this router.",
            labels=("role", "url"),
        )
        for backend in self._backends():
            for one in BackendState:
                state.add_metric((backend.role, backend.url, one), float(backend.state is one))
            requests.add_metric((backend.role, backend.url), backend.outstanding)
        blocks = GaugeMetricFamily(
            f"{ROUTER_PREFIX}known_blocks",
            "Blocks of tokens that the engine has in host memory, by its KV events.",
            labels=("url", "rank", "address"),
        )
        gaps = CounterMetricFamily(
            f"{ROUTER_PREFIX}event_gaps",
            "Times that KV events of the engine were lost.",
            labels=("url", "rank"),
        )
        for followed in self._followed:
            url, rank = followed.url, str(followed.rank)
            blocks.add_metric((url, rank, followed.address or ""), followed.blocks)
            gaps.add_metric((url, rank), followed.gaps)
        yield from (state, requests, blocks, gaps)
