"""Lets vLLM import models that take images on a machine without torchvision: importing this is enough."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any
from unittest import mock


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed. In their modules every name means nothing."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None:
        pass


def declare() -> None:
    """In this process."""
    from transformers.utils import import_utils

    # Asked once and remembered: transformers must process images without it.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    sys.meta_path.append(Missing("torchvision"))


declare()
