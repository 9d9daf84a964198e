"""An agent that has nothing to do costs nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvferry.geometry import Region
from kvferry.transport.agent import Agent

# It measures CPU time of this process for two seconds.
pytestmark = [pytest.mark.transport, pytest.mark.long]


def test_an_idle_agent_takes_no_processor_time() -> None:
    agent = Agent("idle")
    memory = np.zeros(1 << 20, np.uint8)
    agent.register([Region(int(memory.ctypes.data), memory.nbytes)])
    started, used = time.monotonic(), time.process_time()
    time.sleep(2)
    share = (time.process_time() - used) / (time.monotonic() - started)
    agent.close()
    assert share < 0.1
