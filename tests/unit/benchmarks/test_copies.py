"""Copies of blocks are measured with the kernel, with numpy and with memcpy."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from benchmarks.copies import report
from benchmarks.copies.measure import CASES, CopyCase, CopyTimes, measure
from kvferry.common.errors import ConfigError
from kvferry.memory import copy_kernel


@pytest.mark.skipif(copy_kernel.KERNEL is None, reason=copy_kernel.WHY_NO_KERNEL)
def test_every_copy_is_measured_in_both_directions():
    found = measure(1 << 20, 7, lambda text: None)
    assert [(one.case, one.storing) for one in found] == [(c, s) for c in CASES for s in (True, False)]
    for one in found:
        assert 0 < one.copied_bytes <= 1 << 20
        assert [len(times) for times in one.seconds.values()] == [7, 7, 7]
        assert all(min(times) > 0 for times in one.seconds.values())
    assert copy_kernel.KERNEL is not None, "the kernel is there again for other code"


def test_heads_and_transposed_keys_lie_as_the_cases_say():
    rows, keys = CopyCase("rows", 2, 4), CopyCase("keys", 2, 4, transposed=True)
    for case, shape, axes in ((rows, (2, 8, 4), (1, 0, 2)), (keys, (8, 128, 2, 4), (0, 2, 1, 3))):
        block = np.arange(case.cell_bytes) % 251
        found = np.zeros(case.cell_bytes, np.int64)
        starts = np.indices([loop.count for loop in case.loops]).reshape(len(case.loops), -1).T
        for start in starts:
            src = sum(i * loop.src for i, loop in zip(start, case.loops, strict=True))
            dst = sum(i * loop.dst for i, loop in zip(start, case.loops, strict=True))
            found[dst : dst + case.run] = block[src : src + case.run]
        assert (found == block.reshape(shape).transpose(axes).reshape(-1)).all()


def test_missing_copy_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(copy_kernel, "KERNEL", None)
    monkeypatch.setattr(copy_kernel, "WHY_NO_KERNEL", "it was not built")
    with pytest.raises(ConfigError, match="no copy kernel to measure: it was not built"):
        measure(1 << 20, 7, lambda text: None)


def test_the_report_fits_into_80_columns():
    seconds = {"numpy": [4e-3] * 7, "kernel": [1e-3] * 6 + [2e-3], "memcpy": [2e-3] * 7}
    found = [CopyTimes(case, storing, 16 << 20, seconds) for case in CASES for storing in (True, False)]
    console = Console(file=io.StringIO(), width=80)
    report.show(found, console)
    said = console.file.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert "runs of 128 B            gather     4.19  16.78   8.39 2.00 1.00-2.00      4.0" in said
    assert report.as_json(found)["copies"][0]["seconds"] == seconds
