"""Plugins of vLLM: what is declared in every process of an engine that is started with them."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

_TESTS = Path(__file__).parents[2]


def with_plugins(folder: Path, *modules: ModuleType) -> dict[str, str]:
    """Environment of an engine that has each module's `declare` for a plugin, installed in `folder`."""
    installed = folder / "of_tests-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: of-tests\nVersion: 1\n")
    lines = [f"{module.__name__.rpartition('.')[2]} = {module.__name__}:declare\n" for module in modules]
    (installed / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
    path = [str(_TESTS), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
