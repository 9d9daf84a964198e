"""Users without a home, or with one that they may not look into: an engine's parts do without, in words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.user_cache import user_cache

NOBODY = 54321
"""A number without an entry in the table of users, as containers run as."""

IMPORTS = "import kvferry.transport.costs, kvferry.tiers.place, kvferry.cache.weights, kvferry.doctor.costs"
"""Before the process is another user's: it may not be allowed to read the interpreter's folder."""


def said(line: str, **environment: str) -> str:
    """What a process of such a user prints; the last line, if it raises."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    lines = [IMPORTS, f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})", line]
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], **environment},
    )
    return (run.stdout or run.stderr).strip().splitlines()[-1]


def test_the_directory_is_below_the_users_cache():
    assert str(user_cache({"XDG_CACHE_HOME": "/cache"})) == "/cache/kvferry"


def test_a_user_without_a_home_is_told_what_to_set():
    assert said("kvferry.tiers.place.user_directory()") == (
        f"kvferry.errors.ConfigError: user {NOBODY} has no home; "
        "set XDG_CACHE_HOME to a directory that it may write"
    )


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}, {"XDG_CACHE_HOME": "/root/cache"}], ids=str)
def test_costs_and_digests_are_done_without_where_they_cannot_be_looked_for(environment):
    costs = "kvferry.transport.costs.costs_of() == kvferry.planning.strategy.Costs()"
    assert said(f"print({costs}, kvferry.cache.weights.remembered()[1])", **environment) == "True 0"


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}], ids=str)
def test_the_doctor_says_that_costs_are_built_in(environment):
    found = said("print(kvferry.doctor.costs.check(None, None).found)", **environment)
    assert found.startswith("the planner uses built-in costs")
