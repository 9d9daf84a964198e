"""A pytest plugin: KV in host memory is copied as if it were on a GPU.

The Triton kernel runs under Triton's interpreter (``TRITON_INTERPRET=1``), which needs no GPU. There are no
streams: a copy is done when its function returns.
"""

from __future__ import annotations

import threading

from kvferry.memory import device_copy, device_kernel
from kvferry.memory.address_space import AddressSpace
from support.triton_interpreter import skip_unused_checks

_launches: list[int] = []
_one_at_a_time = threading.Lock()  # the interpreter's state is global, and lanes are threads


def pytest_configure() -> None:
    assert device_kernel.copy_cells_kernel is not None, device_kernel.WHY_NO_KERNEL
    skip_unused_checks()
    AddressSpace.on_host = False  # type: ignore[assignment,method-assign]
    launch = device_copy._launch

    def counted(view, packed, cells, unit, count) -> None:
        with _one_at_a_time:
            launch(view, packed, cells, unit, count)
        _launches.append(count)

    device_copy._launch = counted


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"the kernel copied {sum(_launches)} cells")
