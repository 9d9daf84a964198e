"""Users without a home directory, or with one that they may not read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

import kvferry
import kvferry.cache.weights
import kvferry.planning.strategy
import kvferry.tiers.paths
import kvferry.tools.doctor.costs
import kvferry.tools.plan.find
import kvferry.tools.serving.processes
import kvferry.tools.serving.specs
import kvferry.transport.costs
import kvferry.transport.security
from kvferry.common.files import user_cache

NOBODY = 54321
"""A number without an entry in the table of users, as containers run as."""

REFUSED = "ConfigError: "


def said(expression: str, **environment: str) -> str:
    """Return the value of an expression in a process of such a user, or the error that it raises, as text."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        _evaluate(expression, environment, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text


def _evaluate(expression: str, environment: dict[str, str], write: int) -> NoReturn:
    """Become another user, write the value of an expression to a pipe, and exit."""
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        path = os.environ["PATH"]
        os.environ.clear()
        os.environ.update(environment, PATH=path)
        try:
            text = str(eval(expression, {"kvferry": kvferry}))
        except Exception as error:  # noqa: BLE001 - the answer
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    finally:
        os._exit(1)


def test_the_directory_is_below_the_users_cache():
    assert str(user_cache({"XDG_CACHE_HOME": "/cache"})) == "/cache/kvferry"


def test_an_error_names_the_variable_to_set_for_a_user_without_a_home():
    assert said("kvferry.tiers.paths.default_directory()") == (
        f"{REFUSED}this user has no home directory; set XDG_CACHE_HOME to a directory that it may write"
    )


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}, {"XDG_CACHE_HOME": "/root/cache"}], ids=str)
def test_built_in_costs_and_no_digests_are_used_if_the_cache_cannot_be_read(environment):
    costs = "kvferry.transport.costs.load_costs() == kvferry.planning.strategy.Costs()"
    assert said(f"{costs}, kvferry.cache.weights.cached_digests()[1]", **environment) == "(True, 0)"


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}], ids=str)
def test_the_doctor_reports_built_in_costs(environment):
    found = said("kvferry.tools.doctor.costs.check(None, None).found", **environment)
    assert found.startswith("the planner uses built-in costs")


def test_a_home_that_the_user_may_not_enter_is_named_in_the_error_about_the_key(tmp_path):
    closed(tmp_path)
    assert said("kvferry.transport.security.read_keys(None)", HOME=str(tmp_path)) == (
        f"{REFUSED}no secret_file is set, and {tmp_path}/.local/state/kvferry cannot hold the "
        "key of this user's engines: Permission denied; set secret_file to a file with the engines' secret "
        "(kvferry keygen FILE makes one)"
    )


def test_a_model_that_the_user_may_not_read_is_named(tmp_path):
    closed(tmp_path)
    assert said(f"kvferry.tools.serving.specs.fleet_specs('{tmp_path}/model')") == (
        f"{REFUSED}the model at {tmp_path}/model cannot be read: Permission denied; give a "
        f"folder that user {NOBODY} may read, or the id of a model"
    )
    assert said(f"kvferry.tools.plan.find.find_config('{tmp_path}/model')") == (
        f"{REFUSED}cannot read {tmp_path}/model: Permission denied; give a config.json or the folder it is in"
    )


@pytest.mark.parametrize("path", ["~/model", "~nobody-of-this-name/model"])
def test_the_home_of_an_unknown_user_is_a_missing_path(path):
    assert said(f"kvferry.tools.serving.specs.fleet_specs('{path}')") == (
        f"{REFUSED}there is no model at {path}; give a folder that exists, or the id of a model"
    )


def test_the_folder_of_compiled_code_has_the_number_of_a_user_without_a_name():
    assert Path(said("kvferry.tools.serving.processes.compiled_code()")).name == f"torchinductor_uid_{NOBODY}"


def closed(folder: Path) -> None:
    """Let only its owner enter a folder."""
    folder.chmod(0o700)
