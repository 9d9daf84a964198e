"""Let vLLM see a Triton backend for CPUs, so that it runs its kernels by Triton's interpreter.

vLLM counts the entries of Triton's table of backends that have an active driver. Triton ships none for CPUs.
This module is imported at the start of every interpreter that has its folder on ``PYTHONPATH``.
"""

from types import SimpleNamespace

import triton.backends
from triton.backends.compiler import GPUTarget


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0


triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=_Driver)
