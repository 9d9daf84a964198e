"""Check an engine's metrics: snapshots for shared prefixes, dropped chunks, the speed of reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.common.units import counted, format_bytes
from kvferry.connector import ConnectorConfig
from kvferry.observe import PREFIX
from kvferry.planning import Strategy
from kvferry.tiers import PutOutcome
from kvferry.tools.doctor.finding import Finding, bad, note, ok

_FAULTS = frozenset(one for one in PutOutcome if one.dropped)
# A counter has all drops since the start, also those of a fault that was mended long ago.
_SHARE_OF_FAULTS = 0.01
# Below this many bytes per second, READs are carried by TCP, or something else is wrong.
_SLOW_READS = 1e9
_PREFIXES = "shared prefixes"
_NEARLY_ALL = (
    "first_snapshot_tokens is 0: with recurrent state, a prompt that shares only its beginning with others "
    "computes nearly all of it again"
)
_PLAN = "`kvferry plan MODEL` prints what that costs"


def of_metrics(text: str) -> list[Finding]:
    """Return the findings on an engine's page of metrics."""
    # Only kvferry's lines are parsed: vLLM's are many, and an error in them would hide what is found here.
    lines = (line for line in text.splitlines() if line.startswith(PREFIX))
    families = text_string_to_metric_families("\n".join(lines))
    samples = [one for family in families for one in family.samples]
    return [*_check_snapshots(samples), *_check_drops(samples), *_check_reads(samples)]


def of_config(config: ConnectorConfig) -> list[Finding]:
    """Return a note if a configuration with tiers turns snapshots for shared prefixes off."""
    if config.first_snapshot_tokens != 0:
        return []
    return [note(_PREFIXES, _NEARLY_ALL, f"leave first_snapshot_tokens out; {_PLAN}")]


def _check_drops(samples: list[Sample]) -> Iterator[Finding]:
    stored, dropped = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for sample in samples:
        if sample.name == f"{PREFIX}tier_stored_chunks_total":
            stored[sample.labels["tier"]] += int(sample.value)
        elif sample.name == f"{PREFIX}tier_dropped_chunks_total" and sample.value:
            dropped[sample.labels["tier"]][sample.labels["reason"]] += int(sample.value)
    for tier, reasons in sorted(dropped.items()):
        every = stored[tier] + reasons.total()
        said = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        what = f"{reasons.total():,} of {counted(every, 'chunk')} dropped since the engine started: {said}"
        faults = sum(count for reason, count in reasons.items() if reason in _FAULTS)
        if faults >= _SHARE_OF_FAULTS * every:
            advice = "read the engine's log, and check the storage with kvferry doctor --config"
            yield bad(f"tier {tier}", what, advice)
        else:
            yield note(f"tier {tier}", what)


def _check_reads(samples: list[Sample]) -> Iterator[Finding]:
    for sample in samples:
        if sample.name != f"{PREFIX}read_bytes_per_second" or "strategy" not in sample.labels:
            continue
        strategy, gigabytes = sample.labels["strategy"], f"{sample.value / 1e9:.2g} GB/s"
        said = f"{gigabytes}, as measured at first contact with the last peer; strategy {strategy}"
        # With shared memory, the speed of READs does not matter.
        if sample.value >= _SLOW_READS or strategy == Strategy.SHARED:
            yield ok("reads from peers", said)
        else:
            advice = (
                "kvferry explain says why host memory is not shared; the doctor names the transport if it "
                "runs on the engines' machine"
            )
            yield note("reads from peers", said, advice)


def _check_snapshots(samples: list[Sample]) -> Iterator[Finding]:
    values = {sample.name: sample.value for sample in samples}
    # Only such engines have these gauges, and only after their first step.
    first, size = (values.get(f"{PREFIX}{name}") for name in ("first_snapshot_tokens", "snapshot_bytes"))
    if first is None or size is None:
        return
    tokens, each = int(first), format_bytes(size)
    if tokens:
        doubles = f"{tokens:,}, {2 * tokens:,}, {4 * tokens:,} ... tokens of a prompt"
        yield ok(_PREFIXES, f"snapshots of {each} at {doubles}, and where prompts depart from each other")
        return
    advice = (
        f"leave first_snapshot_tokens out: each doubling of a prompt's length, from 1,024 tokens or more on, "
        f"then keeps a snapshot of {each}; {_PLAN}"
    )
    yield note(_PREFIXES, _NEARLY_ALL, advice)
