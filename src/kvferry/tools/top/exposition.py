"""Parse a `/metrics` page in Prometheus's text format.

https://prometheus.io/docs/instrumenting/exposition_formats/ describes the format.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvferry.errors import ProtocolError
from kvferry.observe.exposed_names import COMMON, EXPOSED, VLLM_PREFIX, series_names
from kvferry.observe.metrics import PREFIX
from kvferry.tools.top.values import Labels, Values

_STARTED = "process_start_time_seconds"
_LABELS = {one: {*COMMON, *metric.labels} for name, metric in EXPOSED.items() for one in series_names(name)}
_WANTED = _LABELS.keys() | {_STARTED}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The content of one reading of `/metrics` from an API server, which may have several engines.

    Attributes:
        at: monotonic seconds of the reading.
        started: start of the server's process, in seconds since 1970; None if unknown.
        model: name of the served model; empty if unknown.
        ferry: True if the page has kvferry's metrics.
        engines: values of the metrics of each engine, by the metrics' label ``engine``, such as ``0``.
    """

    at: float
    started: float | None
    model: str
    ferry: bool
    engines: Mapping[str, Values]


def parse_page(text: str, at: float) -> Scrape:
    """Parse a page of metrics, and return the metrics that `kvferry top` uses.

    Args:
        at: monotonic seconds of the reading.

    Raises:
        ProtocolError: the page is not in Prometheus's format, or has no metric that `kvferry top` uses.
    """
    engines: defaultdict[str, defaultdict[str, dict[Labels, float]]] = defaultdict(lambda: defaultdict(dict))
    started, model = None, ""
    try:
        # Select the wanted lines first: a page has thousands of lines, and the parser is slow.
        for family in text_string_to_metric_families("\n".join(_wanted(text))):
            for sample in family.samples:
                if sample.name == _STARTED:
                    started = sample.value
                    continue
                labels = _checked(sample.name, sample.labels)
                engine, model = labels.pop("engine"), labels.pop("model_name")
                engines[engine][sample.name][tuple(sorted(labels.items()))] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"/metrics is not in the format of Prometheus: {error}") from error
    if not engines:
        raise ProtocolError(
            f"/metrics has nothing of {VLLM_PREFIX} or {PREFIX} (an engine started with --disable-log-stats?)"
        )
    # A metric has its type there before it has a value.
    ferry = f"# TYPE {PREFIX}" in text
    return Scrape(at, started, model, ferry, {name: Values(of) for name, of in sorted(engines.items())})


def _checked(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Check that a time series has all labels that its metric needs, and return a copy of its labels.

    Raises:
        ValueError: a label is missing, or the label ``le`` of a bucket is not a number.
    """
    if missing := _LABELS[name] - labels.keys():
        raise ValueError(f"{name} has no label {', '.join(sorted(missing))}")
    if name.endswith("_bucket"):
        float(labels.get("le", ""))
    return dict(labels)


def _wanted(text: str) -> Iterator[str]:
    for line in text.splitlines():
        name = _NAME.match(line)
        if name is not None and name[0] in _WANTED:
            yield line
