"""Tests here do not depend on whether vLLM's attention over bfloat16 works on the CPU of this machine."""

from __future__ import annotations

import pytest

from kvferry.tools.serving import machine_checks


@pytest.fixture(autouse=True)
def _working_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines in bfloat16 start. `test_cpu_attention` has the refusal."""
    monkeypatch.setattr(machine_checks, "bfloat16_fault", lambda: "")
