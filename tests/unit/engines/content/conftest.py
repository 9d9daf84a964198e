"""Layers of vLLM's backends whose write operation runs here: vLLM's own on the CPU, CUDA's emulated."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")


@pytest.fixture
def emulated(monkeypatch):
    """CUDA's cache-write operations, emulated while a test lasts."""
    from support.backends import emulated as operations

    operations.install(monkeypatch)
