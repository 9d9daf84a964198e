"""The role of an engine in a prefill/decode pair."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of an engine. BOTH is an engine that does prefill and decode."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
