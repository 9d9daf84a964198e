"""Call functions of the benchmarks in all processes of a vLLM server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import benchmarks

_NAME = "benchmarks_of_kvferry"


def plugin_environment(folder: Path, *functions: Callable[[], None]) -> dict[str, str]:
    """Install functions as general plugins of vLLM; return the environment of servers that call them.

    A server calls a plugin at the start of its processes: API server, engine core and workers.

    Args:
        folder: folder to create and install the plugins in.
        functions: functions of modules that the server can import.
    """
    installed = folder / f"{_NAME}-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1\n")
    names = {f"{_NAME}_{one.__name__}": f"{one.__module__}:{one.__name__}" for one in functions}
    lines = [f"{name} = {target}\n" for name, target in names.items()]
    (installed / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
    source = str(Path(benchmarks.__file__).parents[1])
    path = [str(folder), source, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path)}
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:  # otherwise vLLM loads every plugin
        environment["VLLM_PLUGINS"] = ",".join([*filter(None, [allowed]), *names])
    return environment
