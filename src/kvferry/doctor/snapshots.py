"""Check whether prompts that share only their beginning find it in the tiers, with recurrent state."""

from __future__ import annotations

import re

from kvferry.connector.config import ConnectorConfig
from kvferry.doctor.finding import Finding, note, ok
from kvferry.units import format_bytes

SUBJECT = "shared prefixes"
_GAUGE = r"^kvferry_{}(?:\{{[^}}]*\}})? (\S+)$"
_FIRST, _BYTES = (
    re.compile(_GAUGE.format(name), re.MULTILINE) for name in ("first_snapshot_tokens", "snapshot_bytes")
)
_NEARLY_ALL = (
    "first_snapshot_tokens is 0: with recurrent state, a prompt that shares only its beginning with others "
    "computes nearly all of it again"
)
_PLAN = "`kvferry plan MODEL` prints what that costs"


def of_config(config: ConnectorConfig) -> list[Finding]:
    """Return a note if a configuration with tiers turns snapshots for shared prefixes off.

    Args:
        config: settings of the connector. A configuration does not tell the model.
    """
    if config.first_snapshot_tokens != 0:
        return []
    return [note(SUBJECT, _NEARLY_ALL, f"leave first_snapshot_tokens out; {_PLAN}")]


def of_metrics(text: str) -> list[Finding]:
    """Return a finding on an engine with recurrent state and tiers; an empty list for other engines.

    Args:
        text: the engine's metrics. They have the gauges after the engine's first step.
    """
    first, size = _FIRST.search(text), _BYTES.search(text)
    if first is None or size is None:
        return []
    tokens, each = int(float(first[1])), format_bytes(float(size[1]))
    if tokens:
        doubles = f"{tokens:,}, {2 * tokens:,}, {4 * tokens:,} ... tokens of a prompt"
        return [ok(SUBJECT, f"snapshots of {each} at {doubles}, and where prompts depart from each other")]
    advice = (
        f"leave first_snapshot_tokens out: each doubling of a prompt's length, from 1,024 tokens or more on, "
        f"then keeps a snapshot of {each}; {_PLAN}"
    )
    return [note(SUBJECT, _NEARLY_ALL, advice)]
