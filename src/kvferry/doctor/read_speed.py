"""Check how fast an engine reads from its peers, and how it moves their KV therefore."""

from __future__ import annotations

import re

from kvferry.doctor.finding import Finding, note, ok
from kvferry.planning.strategy import Strategy

SUBJECT = "reads from peers"
_SPEED = re.compile(r'^kvferry_read_bytes_per_second\{[^}]*strategy="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)
_SLOW = 1e9
"""Bytes per second below which READs are carried by TCP, or something else is wrong."""


def of_metrics(text: str) -> list[Finding]:
    """Return a finding for each strategy by which the engine has loaded KV from peers.

    It is a note if READs are slow and are used all the same.

    Args:
        text: content of the engine's page of metrics.
    """
    found = []
    for strategy, value in _SPEED.findall(text):
        speed = float(value)
        said = f"{speed / 1e9:.2g} GB/s, as measured at first contact with the last peer; strategy {strategy}"
        if speed >= _SLOW or strategy == Strategy.SHARED:
            found.append(ok(SUBJECT, said))
        else:
            advice = (
                "kvferry explain says why host memory is not shared; the doctor names the transport if it "
                "runs on the engines' machine"
            )
            found.append(note(SUBJECT, said, advice))
    return found
