"""Asking for large pages changes nothing but how fast memory is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvferry.geometry import Region
from kvferry.memory import shared_memory as huge_pages
from kvferry.memory.shared_memory import request_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("touched", [False, True])
def test_huge_pages_keep_the_content(touched: bool) -> None:
    memory = np.arange(1 << 20, dtype=np.uint64)
    region = Region(int(memory.ctypes.data) + 24, memory.nbytes - 24)
    request_huge_pages(region, touched=touched)
    assert (memory == np.arange(1 << 20)).all()


@pytest.mark.parametrize(
    "region", [Region(8, 100), Region(1 << 60, 1 << 20), Region(1 << 30, 1 << 20, "VRAM")]
)
def test_impossible_regions_are_no_error(region: Region) -> None:
    request_huge_pages(region, touched=True)


def test_memory_too_large_to_copy_is_only_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def madvise(self, _first: object, _length: object, advice: int) -> int:
            given.append(advice)
            return 0

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", Library)
    for size in (huge_pages.COLLAPSE_BYTES, huge_pages.COLLAPSE_BYTES + 4096):
        request_huge_pages(Region(1 << 40, size), touched=True)
    assert given == [huge_pages._HUGEPAGE, huge_pages._COLLAPSE, huge_pages._HUGEPAGE]


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this kernel gives no large pages"
)
def test_memory_that_was_touched_gets_them() -> None:
    memory = np.frombuffer(bytearray(64 << 20), np.uint8)
    before = _large()
    request_huge_pages(Region(int(memory.ctypes.data), memory.nbytes), touched=True)
    if _large() < before + (32 << 20):
        pytest.skip("the kernel has none to give")


def _large() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))
