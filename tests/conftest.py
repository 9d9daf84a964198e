"""For all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from support.examples import examples

# The one profile: the same examples in every run, and no limit to what one may take on a busy machine.
settings.register_profile(
    "same",
    examples(100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("same")
# Hypothesis also draws constants of all modules that happen to be loaded, so the examples of a test would
# depend on the tests before it.
assert hasattr(providers, "_get_local_constants"), "hypothesis changed; keep local constants out another way"
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="run the K-th of N shares of the tests: K/N")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-seed", None) is not None:
        settings.register_profile("seeded", settings.get_profile("same"), derandomize=False)
        settings.load_profile("seeded")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share that ``--share`` names. Tests of one file that share an engine stay together."""
    if not (share := config.getoption("--share")):
        return
    number, count = map(int, share.split("/"))
    groups = [*dict.fromkeys(map(_group, items))]
    kept = {*groups[number - 1 :: count]}
    config.hook.pytest_deselected(items=[item for item in items if _group(item) not in kept])
    items[:] = [item for item in items if _group(item) in kept]


def _group(item: pytest.Item) -> tuple[str, object]:
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid.partition("::")[0], mark and (mark.args or mark.kwargs.get("name"))


# A shell starts what runs in the background with SIGINT ignored, and children inherit that: what is sent an
# interrupt here must be able to hear it. A handler becomes the default again when a child is executed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The key of this machine's user is not what engines of tests share."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory() -> Generator[None]:
    """Keep the sockets of this process's engines apart from those of all others.

    The path is short, because a socket's path has at most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-run-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        yield


@pytest.fixture(autouse=True)
def own_cache_directory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this machine's user has calibrated is not what tests plan with; engines keep their caches."""
    if request.node.get_closest_marker("engine") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs may be no Unicode; a report goes from one process to another as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report
