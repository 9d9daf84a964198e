"""What GPU backends need of a machine before they can be imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from support.triton_interpreter import skip_unused_checks

ABSENT = ("flashinfer",)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that backends import and their cache-write operation does not use."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def pretend(*, triton: bool) -> None:
    """Let GPU backends be imported in this process, before vLLM is.

    Args:
        triton: Triton is importable and runs kernels by its interpreter (``TRITON_INTERPRET=1``).
    """
    sys.meta_path.append(_Absent())
    if triton:
        from triton.backends import backends

        # vLLM for CPUs takes Triton only where it has a backend for them; the interpreter needs none.
        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
        skip_unused_checks()
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=1, name="none")
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = fa_utils.get_scheduler_metadata = None
    type(current_platform).has_device_capability = classmethod(lambda *_, **__: True)
