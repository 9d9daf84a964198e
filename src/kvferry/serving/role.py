"""What an engine does for a request that is served by two."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Which half of the work."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
