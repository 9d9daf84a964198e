"""Phases of a request whose KV cache may be loaded."""

from __future__ import annotations

from enum import Enum


class RequestPhase(Enum):
    """How far the load of a request is; `admission` and `multi.choosing` draw how one leads to another."""

    OPEN = "open"
    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"
