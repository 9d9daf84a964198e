"""Check whether an engine's tiers drop the chunks that they should store."""

from __future__ import annotations

from collections import Counter, defaultdict

from prometheus_client.parser import text_string_to_metric_families

from kvferry.doctor.finding import Finding, bad, note
from kvferry.observe.metrics import PREFIX
from kvferry.tiers.outcome import PutOutcome
from kvferry.units import counted

_STORED, _DROPPED = f"{PREFIX}tier_stored_chunks_total", f"{PREFIX}tier_dropped_chunks_total"
_FAULTS = frozenset(one for one in PutOutcome if one.dropped)
# A counter tells all drops since the start, so it still has those of a fault that was mended long ago.
_SHARE = 0.01


def of_metrics(text: str) -> list[Finding]:
    """Return a finding on each tier of an engine that has dropped chunks since the engine's start.

    It is BAD if at least 1 % of the chunks were dropped because of a fault of the tier's storage.

    Args:
        text: content of the engine's page of metrics.
    """
    stored, dropped = Counter[str](), defaultdict[str, Counter[str]](Counter)
    lines = [line for line in text.splitlines() if line.startswith((_STORED, _DROPPED))]
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name == _STORED:
                stored[sample.labels["tier"]] += int(sample.value)
            elif sample.value:
                dropped[sample.labels["tier"]][sample.labels["reason"]] += int(sample.value)
    found = []
    for tier, reasons in sorted(dropped.items()):
        every = stored[tier] + reasons.total()
        said = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        what = f"{reasons.total():,} of {counted(every, 'chunk')} dropped since the engine started: {said}"
        faults = sum(count for reason, count in reasons.items() if reason in _FAULTS)
        if faults >= _SHARE * every:
            advice = "read the engine's log, and check the storage with kvferry doctor --config"
            found.append(bad(f"tier {tier}", what, advice))
        else:
            found.append(note(f"tier {tier}", what))
    return found
