"""Users without a home, or with one that they may not look into: an engine's parts do without, in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.user_cache import user_cache

NOBODY = 54321
"""A number without an entry in the table of users, as containers run as."""

REFUSED = "kvferry.errors.ConfigError: "

IMPORTS = """
import kvferry.transport.costs_file, kvferry.tiers.paths, kvferry.cache.weights, kvferry.doctor.costs
import kvferry.plan.find, kvferry.serving.specs, kvferry.serving.temporary, kvferry.transport.key_file
"""
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
    assert said("kvferry.tiers.paths.default_directory()") == (
        "kvferry.errors.ConfigError: this user has no home directory; "
        "set XDG_CACHE_HOME to a directory that it may write"
    )


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}, {"XDG_CACHE_HOME": "/root/cache"}], ids=str)
def test_costs_and_digests_are_done_without_where_they_cannot_be_looked_for(environment):
    costs = "kvferry.transport.costs_file.load_costs() == kvferry.planning.strategy.Costs()"
    assert said(f"print({costs}, kvferry.cache.weights.cached_digests()[1])", **environment) == "True 0"


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}], ids=str)
def test_the_doctor_says_that_costs_are_built_in(environment):
    found = said("print(kvferry.doctor.costs.check(None, None).found)", **environment)
    assert found.startswith("the planner uses built-in costs")


def test_a_home_that_the_user_may_not_enter_holds_no_key(tmp_path):
    closed(tmp_path)
    assert said("kvferry.transport.key_file.read_keys(None)", HOME=str(tmp_path)) == (
        f"{REFUSED}no secret_file is set, and {tmp_path}/.local/state/kvferry cannot hold the "
        "key of this user's engines: Permission denied; set secret_file to a file with the engines' secret "
        "(kvferry keygen FILE makes one)"
    )


def test_a_model_that_the_user_may_not_read_is_named(tmp_path):
    closed(tmp_path)
    assert said(f"kvferry.serving.specs.fleet_specs('{tmp_path}/model')") == (
        f"{REFUSED}the model at {tmp_path}/model cannot be read: Permission denied; give a "
        f"folder that user {NOBODY} may read, or the id of a model"
    )
    assert said(f"kvferry.plan.find.find_config('{tmp_path}/model')") == (
        f"{REFUSED}cannot read {tmp_path}/model: Permission denied; give a config.json or the folder it is in"
    )


@pytest.mark.parametrize("path", ["~/model", "~nobody-of-this-name/model"])
def test_a_home_that_nobody_has_is_a_path_that_is_not_there(path):
    assert said(f"kvferry.serving.specs.fleet_specs('{path}')") == (
        f"{REFUSED}there is no model at {path}; give a folder that exists, or the id of a model"
    )


def test_compiled_code_of_a_user_without_a_name_goes_by_the_number():
    assert (
        Path(said("print(kvferry.serving.temporary.compiled_code())")).name == f"torchinductor_uid_{NOBODY}"
    )


def closed(folder: Path) -> None:
    """Let only its owner enter a folder."""
    folder.chmod(0o700)
