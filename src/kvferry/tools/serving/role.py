"""The role of an engine. The settings of its connector are elsewhere: the help of the commands needs none."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of an engine: PREFILL, DECODE, or BOTH for an engine that prefills and decodes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
