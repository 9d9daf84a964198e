"""The role of an engine in a prefill/decode pair."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of an engine: PREFILL, DECODE, or BOTH for an engine that prefills and decodes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
