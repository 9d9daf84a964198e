"""The KV that an engine has loaded instead of computing it, from the engine's metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.common.errors import KVFerryError

_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.2
_LEAST_SHARE = 0.5
"""Least share of the requests that must have used loaded KV."""


class NothingMoved(KVFerryError):
    """Raised if too few answers depend on KV that was moved, so a comparison proves nothing."""


@dataclass(frozen=True, slots=True)
class MovedKv:
    """What an engine got from one source since it was started.

    Attributes:
        asked: number of requests that asked for the source's KV.
        served: number of these requests that got it.
        tokens: number of tokens whose KV was read.
        read_bytes: number of bytes that were read.
        misses: numbers of the other requests, by reason.
    """

    asked: int
    served: int
    tokens: int
    read_bytes: int
    misses: Mapping[str, int]


def read_moved(url: str, source: str, questions: int) -> MovedKv:
    """Read the metrics of an engine, and wait shortly if they do not have all requests yet.

    Args:
        url: base URL of the engine.
        source: source of the KV, as the metrics name it.
        questions: number of answered requests.

    Raises:
        KVFerryError: the metrics cannot be read.
    """
    until = time.monotonic() + _SETTLE_SECONDS
    while True:
        moved = parse_moved(_page(url), source)
        if moved.served + sum(moved.misses.values()) >= questions or time.monotonic() > until:
            return moved
        time.sleep(_POLL_SECONDS)


def _page(url: str) -> str:
    try:
        # trust_env: ignore a proxy set in the environment, because the engine is on this machine.
        return httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise KVFerryError(f"the metrics of {url} cannot be read: {error}") from error


def parse_moved(page: str, source: str) -> MovedKv:
    """Return the sums over all engines of a page of metrics. Missing metrics count as 0.

    Args:
        page: page in the format of Prometheus.
        source: source of the KV, as the metrics name it.
    """
    lines = "\n".join(line for line in page.splitlines() if line.startswith("kvferry_"))
    sums: dict[str, int] = {}
    misses: dict[str, int] = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if sample.labels.get("source") != source:
                continue
            sums[sample.name] = sums.get(sample.name, 0) + int(sample.value)
            if sample.name == "kvferry_misses_total" and sample.value:
                reason = sample.labels["reason"]
                misses[reason] = misses.get(reason, 0) + int(sample.value)
    return MovedKv(
        asked=sums.get("kvferry_queries_total", 0),
        served=sums.get("kvferry_hits_total", 0),
        tokens=sums.get("kvferry_hit_tokens_total", 0),
        read_bytes=sums.get("kvferry_load_bytes_total", 0),
        misses=misses,
    )


def check_moved(moved: MovedKv, questions: int) -> None:
    """Check that answers depend on KV that was moved.

    Args:
        moved: what the engine got.
        questions: number of answered requests.

    Raises:
        NothingMoved: no byte was read, or fewer than half of the requests got KV.
    """
    if moved.read_bytes and moved.served >= _LEAST_SHARE * questions:
        return
    why = ", ".join(f"{reason}: {count}" for reason, count in sorted(moved.misses.items()))
    raise NothingMoved(
        f"the comparison proves nothing: {moved.served} of {questions} requests got KV that was "
        f"moved ({moved.read_bytes} bytes), expected at least half; misses by reason: {why or 'none'} "
        "(docs/metrics.md says what each reason means)"
    )
