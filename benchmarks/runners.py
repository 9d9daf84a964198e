"""Choose vLLM's model runner for the engines of a benchmark.

The second one is the default on GPUs. It needs Triton. On a CPU its kernels run by Triton's interpreter, as
in the tests, whose support is used here. So its steps take several times as long, with every connector alike.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from kvferry.common.errors import ConfigError

_TESTS = Path(__file__).parents[1] / "tests"
_TRITON = Path(sys.prefix) / "triton"
_VARIABLE = "KVFERRY_TEST_RUNNER"
RUNNERS = (1, 2)


def use_runner(number: int) -> None:
    """Let engines that this process starts have a model runner. It sets environment variables.

    Args:
        number: number of the runner, one of `RUNNERS`.

    Raises:
        ConfigError: the second runner's requirements are not installed.
    """
    if number == RUNNERS[-1] and not _TRITON.is_dir():
        raise ConfigError(f"the second model runner needs Triton in {_TRITON}; run `make .venv/.triton`")
    os.environ[_VARIABLE] = str(number)
    # Python imports Triton's driver for CPUs at its start, so that only new processes have it.
    os.environ.update(_support().environment())


def has_second_runner() -> bool:
    """Return whether `use_runner` chose the second runner."""
    return os.environ.get(_VARIABLE) == str(RUNNERS[-1])


def prepare_runner() -> None:
    """Prepare this process, whose engine has the runner that `use_runner` chose. It imports vLLM."""
    if not has_second_runner():
        return
    _support().declare()


def _support() -> Any:
    """Return the module of the tests that knows the runners. It reads `_VARIABLE` when it is imported."""
    sys.path.append(str(_TESTS))
    return import_module("support.vllm_engine.runners")
