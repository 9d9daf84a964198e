"""Role of an engine in a prefill/decode pair."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Role of an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
