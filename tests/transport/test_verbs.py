"""A process that used NIXL ends as it should, whatever RDMA libraries the system has."""

import subprocess
import sys

import pytest

from kvferry.transport.agent import LIBRARY, preload

pytestmark = pytest.mark.transport

PROGRAM = """
from kvferry.transport.agent import Agent
agent = Agent("ending", progress=True)
assert any(LIBRARY in line for line in open("/proc/self/maps")), "NIXL does not load it any more"
"""


@pytest.mark.skipif(not preload(), reason=f"no {LIBRARY} here")
@pytest.mark.parametrize("kept", [True, False])
def test_a_process_that_made_an_agent_exits_with_0(kept):
    program = f"LIBRARY = {LIBRARY!r}\n{PROGRAM}" + ("" if kept else "del agent\n")
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
