"""An agent that cannot start says what to change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.transport

LINES = """
import resource
from kvferry.transport.agent import Agent
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
Agent("one")
"""


def test_a_limit_of_files_under_which_ucx_does_not_start_is_named() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", LINES], capture_output=True, text=True, check=False, env=environment
    )
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("kvferry.common.errors.ConfigError: NIXL does not start here (")
    assert "files may have 1,048,576 bytes (ulimit -f unlimited)" in last
